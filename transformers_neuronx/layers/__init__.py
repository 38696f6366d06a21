"""The layers of graphs. Each takes tensors and weights by name; none depends on a family or a runtime."""

from transformers_neuronx.layers.activation import (
    ACTIVATIONS as ACTIVATIONS,
    Gate as Gate,
    clamped_swiglu as clamped_swiglu,
)
from transformers_neuronx.layers.alibi import alibi_slopes as alibi_slopes
from transformers_neuronx.layers.attention import (
    LAYER_KINDS as LAYER_KINDS,
    Rotate as Rotate,
    attend as attend,
    attention as attention,
    heads_of as heads_of,
    window_of as window_of,
)
from transformers_neuronx.layers.convolution import gated_convolution as gated_convolution
from transformers_neuronx.layers.delta_net import delta_net as delta_net
from transformers_neuronx.layers.distance import (
    causal_distances as causal_distances,
    distance_bias as distance_bias,
    distances_both_ways as distances_both_ways,
)
from transformers_neuronx.layers.embedding import embedding as embedding, lookup as lookup
from transformers_neuronx.layers.experts import Router as Router, experts as experts
from transformers_neuronx.layers.latent import latent_attention as latent_attention
from transformers_neuronx.layers.linear import activated as activated, linear as linear, logits as logits
from transformers_neuronx.layers.linear_attention import LinearAttention as LinearAttention, softplus as softplus
from transformers_neuronx.layers.mamba import mamba as mamba
from transformers_neuronx.layers.memory import (
    Memory as Memory,
    attend_to as attend_to,
    attention_over as attention_over,
    remembered as remembered,
)
from transformers_neuronx.layers.mlp import gated_mlp as gated_mlp, mlp as mlp
from transformers_neuronx.layers.norm import layer_norm as layer_norm, normalize as normalize, rms_norm as rms_norm
from transformers_neuronx.layers.rotary import (
    Rotary as Rotary,
    RotaryConfig as RotaryConfig,
    frequencies_in_checkpoints as frequencies_in_checkpoints,
    growing as growing,
    grown as grown,
    rotaries as rotaries,
    rotation as rotation,
    turning as turning,
)
from transformers_neuronx.layers.state import State as State, scan as scan
from transformers_neuronx.layers.step import Cache as Cache, Placed as Placed, Step as Step
