"""What of a GPT-2 configuration its graph and weights need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers_neuronx.config import HFAttributes
from transformers_neuronx.layers import ACTIVATIONS


@dataclass(frozen=True)
class GPT2Config:
    vocab_size: int
    n_positions: int
    hidden_size: int
    n_layer: int
    n_head: int
    n_kv_head: int
    inner_size: int
    activation: str
    eps: float
    tied: bool

    @staticmethod
    def from_hf(hf: Any) -> GPT2Config:
        read = HFAttributes(hf)
        hidden_size = read.take("n_embd")
        for name, only in (
            ("scale_attn_weights", True),
            ("scale_attn_by_inverse_layer_idx", False),
            ("add_cross_attention", False),
        ):
            read.choose(name, [only], only)
        read.take("reorder_and_upcast_attn", False)  # where to round; scores are in f32 here in any case
        read.take("n_ctx", None)  # an old name of n_positions
        config = GPT2Config(
            vocab_size=read.take("vocab_size"),
            n_positions=read.take("n_positions"),
            hidden_size=hidden_size,
            n_layer=read.take("n_layer"),
            n_head=read.take("n_head"),
            n_kv_head=read.take("n_head"),
            inner_size=read.take("n_inner", None) or 4 * hidden_size,
            activation=read.choose("activation_function", ACTIVATIONS, "gelu_new"),
            eps=read.take("layer_norm_epsilon", 1e-5),
            tied=read.take("tie_word_embeddings", True),
        )
        read.finish()
        return config

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.n_head
