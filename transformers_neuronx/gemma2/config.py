"""The fields of a Gemma 2 configuration that its graph and weights need."""

import math
from dataclasses import dataclass
from typing import ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.layers import ACTIVATIONS, LAYER_KINDS
from transformers_neuronx.llama.like import SANDWICH, LlamaLike


@dataclass(frozen=True)
class Gemma2Config(LlamaLike):
    activation: str = hf("hidden_activation", among=ACTIVATIONS)
    query_scale: float = hf("query_pre_attn_scalar")
    softcap: float | None = hf("attn_logit_softcapping", None)
    logit_softcap: float | None = hf("final_logit_softcapping", None)
    window: int = hf("sliding_window")
    layer_kinds: list[str] = hf("layer_types", among=LAYER_KINDS)

    tied = True
    norms = SANDWICH
    norm_plus_one = True

    FIXED: ClassVar = {"attention_bias": False, "use_bidirectional_attention": False, "tie_word_embeddings": True}
    WITHOUT_EFFECT: ClassVar = frozenset({"hidden_act", "cache_implementation"})

    @property
    def embedding_scale(self) -> float:  # type: ignore[override]
        return math.sqrt(self.hidden_size)

    @property
    def attention_scale(self) -> float:  # type: ignore[override]
        return 1 / math.sqrt(self.query_scale)
