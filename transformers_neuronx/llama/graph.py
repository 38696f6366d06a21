"""The forward pass of LLaMA and the families like it: rotary positions, grouped keys, RMS norms, gated feed-forward."""

from typing import Any

from transformers_neuronx.layers import (
    Cache,
    RotaryConfig,
    Rotate,
    Step,
    attention,
    embedding,
    gated_mlp,
    logits,
    rms_norm,
    rotation,
    window_of,
)
from transformers_neuronx.pyhlo import Tensor


class LlamaLike(RotaryConfig):
    """A configuration for this graph and LLaMA's weight table.

    A family overrides what differs: with a field if checkpoints of the family differ, otherwise with a value. The
    attributes here are not fields, because artifacts list a family's fields.
    """

    activation: str
    tied: bool  # the head is the embedding
    attention_bias: bool = False  # biases of queries, keys, values and output
    qkv_bias: bool = False  # biases of queries, keys and values, whatever attention_bias is
    qk_norm: bool = False  # norms of queries and keys
    mlp_bias: bool = False
    window: int | None = None  # of all layers; if the configuration has layer_kinds, of "sliding_attention" alone

    def window_of(self, kind: str) -> int | None:
        return window_of(kind, self.window) if kind else self.window


def embed(config: LlamaLike, w: Any, step: Step) -> Tensor:
    return embedding(w.embed, step.ids)  # [b, n, h]


def prepare(config: LlamaLike, step: Step) -> Rotate:
    return rotation(config.rotary, step)


def layer(
    config: LlamaLike, w: Any, x: Tensor, cache: Cache, step: Step, rotate: Rotate, kind: str = ""
) -> tuple[Tensor, Cache]:
    window = config.window_of(kind)
    norm_eps = config.eps if config.qk_norm else None
    h = rms_norm(x, w.attn_norm, config.eps)
    h, cache = attention(h, w.attn, cache, step, config.head_dim, rotate, window=window, norm_eps=norm_eps)
    x = x + h
    h = gated_mlp(rms_norm(x, w.mlp_norm, config.eps), w.mlp, config.activation)
    return x + h, cache


def norm(config: LlamaLike, w: Any, x: Tensor) -> Tensor:
    return rms_norm(x, w.final_norm, config.eps)


def head(config: LlamaLike, w: Any, x: Tensor) -> Tensor:
    return logits(norm(config, w, x), w.head)  # f32[b, n, vocab]
