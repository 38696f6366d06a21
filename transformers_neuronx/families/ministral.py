"""Ministral: Mistral with windows in some layers."""

from dataclasses import dataclass

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import ACTIVATIONS, LAYER_KINDS
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.like import LlamaLike
from transformers_neuronx.models.sampling import ForSampling


@dataclass(frozen=True)
class MinistralConfig(LlamaLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    tied: bool = hf("tie_word_embeddings")
    layer_kinds: list[str] = hf("layer_types", among=LAYER_KINDS)
    window: int | None = hf("sliding_window", None)


class MinistralForSampling(ForSampling):
    """Transformers' `MinistralForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(MinistralConfig.from_hf, weights, graph, prepare=graph.prepare, folder="ministral")
