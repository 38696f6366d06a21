"""The fields of a Qwen2 configuration that its graph and weights need."""

from dataclasses import dataclass
from typing import ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.layers import ACTIVATIONS, LAYER_KINDS
from transformers_neuronx.llama.like import LlamaLike


@dataclass(frozen=True)
class Qwen2Config(LlamaLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    tied: bool = hf("tie_word_embeddings")
    layer_kinds: list[str] = hf("layer_types", among=LAYER_KINDS)
    window: int | None = hf("sliding_window", None)

    qkv_bias = True

    FIXED: ClassVar = {"use_mrope": False}
    # layer_types follows from them.
    WITHOUT_EFFECT: ClassVar = frozenset({"max_window_layers", "use_sliding_window"})
