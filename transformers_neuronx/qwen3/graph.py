"""Qwen3's forward pass: rotary positions, grouped keys, RMS norms, also of queries and keys, a gated feed-forward."""

from typing import Any

from transformers_neuronx.layers import (
    Cache,
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
from transformers_neuronx.qwen3.config import Qwen3Config


def embed(config: Qwen3Config, w: Any, step: Step) -> Tensor:
    return embedding(w.embed, step.ids)  # [b, n, h]


def prepare(config: Qwen3Config, step: Step) -> Rotate:
    return rotation(config.rotary, step)


def layer(
    config: Qwen3Config, w: Any, x: Tensor, cache: Cache, step: Step, rotate: Rotate, kind: str
) -> tuple[Tensor, Cache]:
    h = rms_norm(x, w.attn_norm, config.eps)
    window = window_of(kind, config.window)
    h, cache = attention(h, w.attn, cache, step, config.head_dim, rotate, window=window, norm_eps=config.eps)
    x = x + h
    h = gated_mlp(rms_norm(x, w.mlp_norm, config.eps), w.mlp, config.activation)
    return x + h, cache


def head(config: Qwen3Config, w: Any, x: Tensor) -> Tensor:
    return logits(rms_norm(x, w.final_norm, config.eps), w.head)  # f32[b, n, vocab]
