"""What of a GPT-NeoX configuration its graph and weights need."""

from dataclasses import dataclass
from typing import Any, ClassVar

from transformers_neuronx.config import ModelConfig, hf
from transformers_neuronx.layers import ACTIVATIONS, Rotary
from transformers_neuronx.weights import Heads


@dataclass(frozen=True)
class GPTNeoXConfig(ModelConfig):
    vocab_size: int = hf("vocab_size")
    max_positions: int = hf("max_position_embeddings", 2048)
    hidden_size: int = hf("hidden_size")
    n_layer: int = hf("num_hidden_layers")
    n_head: int = hf("num_attention_heads")
    inner_size: int = hf("intermediate_size")
    activation: str = hf("hidden_act", "gelu", among=ACTIVATIONS)
    eps: float = hf("layer_norm_eps", 1e-5)
    attention_bias: bool = hf("attention_bias", True)
    parallel: bool = hf("use_parallel_residual", True)
    tied: bool = hf("tie_word_embeddings", False)
    rotary_base: float = hf("rotary_emb_base", 10000.0)  # this and the next stand in `rope` since Transformers 5
    rotary_fraction: float = hf("rotary_pct", 0.25)
    rope: dict[str, Any] = hf("rope_parameters", lambda attributes: attributes.get("rope_scaling") or {})
    WITHOUT_EFFECT: ClassVar = frozenset({"rope_scaling", "rope_theta", "partial_rotary_factor"})  # older names, too
    n_positions: ClassVar = None

    def __post_init__(self) -> None:
        self.rotary  # noqa: B018  refuses what it cannot turn by

    @property
    def attention_heads(self) -> Heads:
        return Heads(self.n_head, self.n_head, self.hidden_size // self.n_head)

    @property
    def rotary(self) -> Rotary:
        rope = dict(rope_theta=self.rotary_base, partial_rotary_factor=self.rotary_fraction) | self.rope
        return Rotary(int(self.attention_heads.head_dim * rope["partial_rotary_factor"]), rope, self.max_positions)
