"""The fields of a GPT-J configuration that its graph and weights need."""

from dataclasses import dataclass
from typing import ClassVar

from transformers_neuronx.config import ModelConfig, hf
from transformers_neuronx.layers import ACTIVATIONS, Rotary
from transformers_neuronx.weights import Heads


@dataclass(frozen=True)
class GPTJConfig(ModelConfig):
    vocab_size: int = hf("vocab_size")
    n_positions: int = hf("n_positions")
    hidden_size: int = hf("n_embd")
    n_layer: int = hf("n_layer")
    n_head: int = hf("n_head")
    inner_size: int = hf("n_inner", lambda attributes: 4 * attributes["n_embd"])
    rotary_dim: int = hf("rotary_dim")
    activation: str = hf("activation_function", among=ACTIVATIONS)
    eps: float = hf("layer_norm_epsilon")
    tied: bool = hf("tie_word_embeddings")

    FIXED: ClassVar = {"rotary": True, "scale_attn_weights": True}
    WITHOUT_EFFECT: ClassVar = frozenset({"n_ctx"})  # an old name of n_positions

    def __post_init__(self) -> None:
        self.rotary  # noqa: B018  refuses unsupported parameters

    @property
    def attention_heads(self) -> Heads:
        return Heads(self.n_head, self.n_head, self.hidden_size // self.n_head)

    @property
    def rotary(self) -> Rotary:
        return Rotary(self.rotary_dim, {}, self.n_positions)
