"""The fields of a Gemma 2 configuration that its graph and weights need."""

from dataclasses import dataclass
from typing import ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.layers import ACTIVATIONS, LAYER_KINDS, RotaryConfig, window_of


@dataclass(frozen=True)
class Gemma2Config(RotaryConfig):
    activation: str = hf("hidden_activation", among=ACTIVATIONS)
    query_scale: float = hf("query_pre_attn_scalar")
    softcap: float | None = hf("attn_logit_softcapping", None)
    logit_softcap: float | None = hf("final_logit_softcapping", None)
    window: int = hf("sliding_window")
    layer_kinds: list[str] = hf("layer_types", among=LAYER_KINDS)

    FIXED: ClassVar = {"attention_bias": False, "use_bidirectional_attention": False, "tie_word_embeddings": True}
    WITHOUT_EFFECT: ClassVar = frozenset({"hidden_act", "cache_implementation"})

    def window_of(self, kind: str) -> int | None:
        return window_of(kind, self.window)
