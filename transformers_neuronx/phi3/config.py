"""The fields of a Phi-3 configuration that its graph and weights need."""

from dataclasses import dataclass
from typing import ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.layers import ACTIVATIONS
from transformers_neuronx.llama.like import LlamaLike


@dataclass(frozen=True)
class Phi3Config(LlamaLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    tied: bool = hf("tie_word_embeddings")
    window: int | None = hf("sliding_window", None)

    projections = (*["self_attn.qkv_proj"] * 3, "self_attn.o_proj")
    feed_forward = ("mlp.gate_up_proj", "mlp.gate_up_proj", "mlp.down_proj")

    # Phi-4's files have them, and nothing reads them.
    WITHOUT_EFFECT: ClassVar = frozenset({"full_attn_mod", "interpolate_factor"})
    FIXED: ClassVar = dict(attention_bias=False, mlp_bias=False, lm_head_bias=False)
