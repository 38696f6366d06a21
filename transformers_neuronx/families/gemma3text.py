"""Gemma 3: Gemma 2 with norms of queries and keys, and a rotation for each kind of layer."""

import math
from dataclasses import dataclass
from typing import ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import ACTIVATIONS, LAYER_KINDS, Rotary
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.like import SANDWICH, LlamaLike
from transformers_neuronx.models.sampling import ForSampling


@dataclass(frozen=True)
class Gemma3TextConfig(LlamaLike):
    activation: str = hf("hidden_activation", among=ACTIVATIONS)
    tied: bool = hf("tie_word_embeddings")
    attention_bias: bool = hf("attention_bias")
    query_scale: float = hf("query_pre_attn_scalar")
    logit_softcap: float | None = hf("final_logit_softcapping", None)
    layer_kinds: list[str] = hf("layer_types", among=LAYER_KINDS)
    window: int | None = hf("sliding_window", None)

    norms = SANDWICH
    norm_plus_one = True
    qk_norm = True

    # Transformers reads the soft cap of scores, but does not apply it. layer_types follows from the pattern.
    FIXED: ClassVar = {"attn_logit_softcapping": None, "use_bidirectional_attention": False}
    WITHOUT_EFFECT: ClassVar = frozenset({"_sliding_window_pattern", "sliding_window_pattern", "cache_implementation"})

    @property
    def embedding_scale(self) -> float:  # type: ignore[override]
        return math.sqrt(self.hidden_size)

    @property
    def attention_scale(self) -> float:  # type: ignore[override]
        return 1 / math.sqrt(self.query_scale)

    @property
    def rotary(self) -> Rotary:
        return self.rotary_of("full_attention")

    def rotary_of(self, kind: str) -> Rotary:
        return self.rotary_with(self.rope[kind])


class Gemma3TextForSampling(ForSampling):
    """Transformers' `Gemma3ForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(Gemma3TextConfig.from_hf, weights, graph, prepare=graph.prepare, folder="gemma3text")
