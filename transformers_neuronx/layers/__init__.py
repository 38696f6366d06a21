"""The pieces that graphs are made of. Each takes tensors and weights by name; none knows a family or a runtime."""

from transformers_neuronx.layers.activation import ACTIVATIONS as ACTIVATIONS
from transformers_neuronx.layers.attention import attention as attention
from transformers_neuronx.layers.embedding import embedding as embedding, lookup as lookup
from transformers_neuronx.layers.linear import linear as linear, logits as logits
from transformers_neuronx.layers.mlp import mlp as mlp
from transformers_neuronx.layers.norm import layer_norm as layer_norm
from transformers_neuronx.layers.step import Cache as Cache, Step as Step
