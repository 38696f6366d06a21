"""What of a Qwen3 configuration its graph and weights need."""

from dataclasses import dataclass
from typing import ClassVar

from transformers_neuronx.config import WINDOW_ATTRIBUTES, hf, one_window
from transformers_neuronx.layers import ACTIVATIONS, RotaryConfig


@dataclass(frozen=True)
class Qwen3Config(RotaryConfig):
    activation: str = hf("hidden_act", "silu", among=ACTIVATIONS)
    head_dim: int = hf("head_dim", 128)
    attention_bias: bool = hf("attention_bias", False)
    tied: bool = hf("tie_word_embeddings", False)
    window: int | None = hf("layer_types", read=one_window)

    WITHOUT_EFFECT: ClassVar = WINDOW_ATTRIBUTES
