"""What of a Qwen3 configuration its graph and weights need."""

from dataclasses import dataclass
from typing import Any, ClassVar

from transformers_neuronx.config import WINDOW_ATTRIBUTES, ModelConfig, hf, one_window
from transformers_neuronx.layers import ACTIVATIONS, Rotary, rope_parameters
from transformers_neuronx.weights import Heads


@dataclass(frozen=True)
class Qwen3Config(ModelConfig):
    vocab_size: int = hf("vocab_size")
    max_positions: int = hf("max_position_embeddings", 32768)
    hidden_size: int = hf("hidden_size")
    n_layer: int = hf("num_hidden_layers")
    n_head: int = hf("num_attention_heads")
    n_kv_head: int = hf("num_key_value_heads")
    head_dim: int = hf("head_dim", 128)
    inner_size: int = hf("intermediate_size")
    activation: str = hf("hidden_act", "silu", among=ACTIVATIONS)
    eps: float = hf("rms_norm_eps", 1e-6)
    attention_bias: bool = hf("attention_bias", False)
    tied: bool = hf("tie_word_embeddings", False)
    window: int | None = hf("layer_types", read=one_window)
    rope: dict[str, Any] = hf("rope_parameters", rope_parameters)

    WITHOUT_EFFECT: ClassVar = WINDOW_ATTRIBUTES | {"rope_theta", "rope_scaling"}
    n_positions: ClassVar = None

    def __post_init__(self) -> None:
        self.rotary  # noqa: B018  refuses what it cannot turn by

    @property
    def attention_heads(self) -> Heads:
        return Heads(self.n_head, self.n_kv_head, self.head_dim)

    @property
    def rotary(self) -> Rotary:
        return Rotary(self.head_dim, self.rope, self.max_positions)
