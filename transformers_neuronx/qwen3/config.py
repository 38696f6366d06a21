"""The fields of a Qwen3 configuration that its graph and weights need."""

from dataclasses import dataclass
from typing import ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.layers import ACTIVATIONS, LAYER_KINDS
from transformers_neuronx.llama.like import LlamaLike


@dataclass(frozen=True)
class Qwen3Config(LlamaLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    head_dim: int = hf("head_dim")
    attention_bias: bool = hf("attention_bias")
    tied: bool = hf("tie_word_embeddings")
    layer_kinds: list[str] = hf("layer_types", among=LAYER_KINDS)
    window: int | None = hf("sliding_window", None)

    qk_norm = True

    # layer_types follows from them.
    WITHOUT_EFFECT: ClassVar = frozenset({"max_window_layers", "use_sliding_window"})
