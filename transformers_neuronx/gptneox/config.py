"""The fields of a GPT-NeoX configuration that its graph and weights need."""

from dataclasses import dataclass
from typing import ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.layers import ACTIVATIONS, RotaryConfig


@dataclass(frozen=True)
class GPTNeoXConfig(RotaryConfig):
    eps: float = hf("layer_norm_eps")
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    attention_bias: bool = hf("attention_bias")
    parallel: bool = hf("use_parallel_residual")
    tied: bool = hf("tie_word_embeddings")

    # Transformers 4 wrote it in addition to rotary_emb_base.
    WITHOUT_EFFECT: ClassVar = frozenset({"rope_theta"})
