"""GLM-4 (glm-4-9b): half of a head's features rotate, in pairs."""

from dataclasses import dataclass

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import ACTIVATIONS
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.like import LlamaLike
from transformers_neuronx.models.sampling import ForSampling


@dataclass(frozen=True)
class GlmConfig(LlamaLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    tied: bool = hf("tie_word_embeddings")
    qkv_bias: bool = hf("attention_bias")

    in_pairs = True
    feed_forward = ("mlp.gate_up_proj", "mlp.gate_up_proj", "mlp.down_proj")


class GlmForSampling(ForSampling):
    """Transformers' `GlmForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(GlmConfig.from_hf, weights, graph, prepare=graph.prepare, folder="glm")
