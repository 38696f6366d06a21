"""Helium: features rotate in pairs."""

from dataclasses import dataclass

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import ACTIVATIONS
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.like import LlamaLike
from transformers_neuronx.models.sampling import ForSampling


@dataclass(frozen=True)
class HeliumConfig(LlamaLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    tied: bool = hf("tie_word_embeddings")
    qkv_bias: bool = hf("attention_bias")
    mlp_bias: bool = hf("mlp_bias")

    in_pairs = True


class HeliumForSampling(ForSampling):
    """Transformers' `HeliumForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(HeliumConfig.from_hf, weights, graph, prepare=graph.prepare, folder="helium")
