"""The fields of a Qwen3-VL configuration that its graph and weights need; `tower` has those of its tower."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.layers import ACTIVATIONS
from transformers_neuronx.llama.like import LlamaLike
from transformers_neuronx.qwen3vl.tower import TowerConfig


@dataclass(frozen=True)
class Qwen3VLConfig(LlamaLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    head_dim: int = hf("head_dim")
    attention_bias: bool = hf("attention_bias")
    tied: bool = hf("tie_word_embeddings")
    image_token_id: int = hf("image_token_id")
    video_token_id: int = hf("video_token_id")
    vision: dict[str, Any] = hf("vision_config")

    qk_norm = True

    # The attributes of the text half are also beside it; the tokens are for those who write prompts.
    WITHOUT_EFFECT: ClassVar = frozenset({"text_config", "vision_start_token_id", "vision_end_token_id"})

    @cached_property
    def tower(self) -> TowerConfig:
        return TowerConfig.of(self.vision, self.hidden_size)

    @property
    def layer_kinds(self) -> list[str]:
        """The number of features that a layer adds after it, counted from 1; those of later layers are alike."""
        return [str(n + 1) if n < len(self.tower.deep) else "" for n in range(self.n_layer)]

    encoder_layers = property(lambda self: self.tower.n_layer)
    row_parts = property(lambda self: 1 + len(self.tower.deep))
