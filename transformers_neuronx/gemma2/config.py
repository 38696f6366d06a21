"""What of a Gemma 2 configuration its graph and weights need."""

from dataclasses import dataclass
from typing import ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.layers import ACTIVATIONS, RotaryConfig

KINDS = ["sliding_attention", "full_attention"]  # every second layer sees all positions


@dataclass(frozen=True)
class Gemma2Config(RotaryConfig):
    activation: str = hf("hidden_activation", "gelu_pytorch_tanh", among=ACTIVATIONS)
    query_scale: float = hf("query_pre_attn_scalar", 256)
    softcap: float | None = hf("attn_logit_softcapping", lambda attributes: None)
    logit_softcap: float | None = hf("final_logit_softcapping", lambda attributes: None)
    window: int = hf("sliding_window", 4096)
    layer_kinds: list[str] = hf("layer_types", lambda a: [KINDS[i % 2] for i in range(a["num_hidden_layers"])])

    FIXED: ClassVar = {"attention_bias": False, "use_bidirectional_attention": False, "tie_word_embeddings": True}
    WITHOUT_EFFECT: ClassVar = frozenset({"hidden_act", "cache_implementation"})
