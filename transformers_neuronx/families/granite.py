"""Granite: factors of the embedding, of what blocks add, of scores and of logits."""

from dataclasses import dataclass

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import ACTIVATIONS
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.scaled import ScaledLike
from transformers_neuronx.models.sampling import ForSampling


@dataclass(frozen=True)
class GraniteConfig(ScaledLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    tied: bool = hf("tie_word_embeddings")
    attention_bias: bool = hf("attention_bias")
    mlp_bias: bool = hf("mlp_bias")


class GraniteForSampling(ForSampling):
    """Transformers' `GraniteForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(GraniteConfig.from_hf, weights, graph, prepare=graph.prepare, folder="granite")
