"""Gemma: norms multiply by one plus their weight, and the embedding is scaled."""

import math
from dataclasses import dataclass
from typing import ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import ACTIVATIONS
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.like import LlamaLike
from transformers_neuronx.models.sampling import ForSampling


@dataclass(frozen=True)
class GemmaConfig(LlamaLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    tied: bool = hf("tie_word_embeddings")
    attention_bias: bool = hf("attention_bias")

    norm_plus_one = True

    FIXED: ClassVar = {"use_bidirectional_attention": None}
    WITHOUT_EFFECT: ClassVar = frozenset({"hidden_activation"})  # hidden_act follows from it

    @property
    def embedding_scale(self) -> float:  # type: ignore[override]
        return math.sqrt(self.hidden_size)


class GemmaForSampling(ForSampling):
    """Transformers' `GemmaForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(GemmaConfig.from_hf, weights, graph, prepare=graph.prepare, folder="gemma")
