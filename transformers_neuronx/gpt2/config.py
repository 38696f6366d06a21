"""The fields of a GPT-2 configuration that its graph and weights need."""

from dataclasses import dataclass
from typing import ClassVar

from transformers_neuronx.config import ModelConfig, hf
from transformers_neuronx.layers import ACTIVATIONS
from transformers_neuronx.weights import Heads


@dataclass(frozen=True)
class GPT2Config(ModelConfig):
    vocab_size: int = hf("vocab_size")
    n_positions: int = hf("n_positions")
    hidden_size: int = hf("n_embd")
    n_layer: int = hf("n_layer")
    n_head: int = hf("n_head")
    inner_size: int = hf("n_inner", lambda attributes: 4 * attributes["n_embd"])
    activation: str = hf("activation_function", among=ACTIVATIONS)
    eps: float = hf("layer_norm_epsilon")
    tied: bool = hf("tie_word_embeddings")
    scaled: bool = hf("scale_attn_weights")
    scaled_by_layer: bool = hf("scale_attn_by_inverse_layer_idx", False)

    FIXED: ClassVar = {"add_cross_attention": False}
    # The first says where to round, but scores are always f32 here; the second is an old name of n_positions.
    WITHOUT_EFFECT: ClassVar = frozenset({"reorder_and_upcast_attn", "n_ctx"})

    @property
    def attention_heads(self) -> Heads:
        return Heads(self.n_head, self.n_head, self.hidden_size // self.n_head)

    @property
    def layer_kinds(self) -> list[str]:
        """The number of each layer, if scores are divided by it: each layer is then a separate kind."""
        return [str(1 + n) if self.scaled_by_layer else "" for n in range(self.n_layer)]

    def scale(self, kind: str) -> float:
        """Return the factor of the scores in a layer of that kind."""
        return (self.attention_heads.head_dim**-0.5 if self.scaled else 1.0) / int(kind or 1)
