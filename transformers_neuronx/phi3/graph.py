"""Phi-3's forward pass: rotary positions for a part of each head, grouped keys, RMS norms, a gated feed-forward."""

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
)
from transformers_neuronx.phi3.config import Phi3Config
from transformers_neuronx.pyhlo import Tensor


def embed(config: Phi3Config, w: Any, step: Step) -> Tensor:
    return embedding(w.embed, step.ids)  # [b, n, h]


def prepare(config: Phi3Config, step: Step) -> Rotate:
    return rotation(config.rotary, step)


def layer(config: Phi3Config, w: Any, x: Tensor, cache: Cache, step: Step, rotate: Rotate) -> tuple[Tensor, Cache]:
    h = rms_norm(x, w.attn_norm, config.eps)
    h, cache = attention(h, w.attn, cache, step, config.head_dim, rotate, window=config.window)
    x = x + h
    h = gated_mlp(rms_norm(x, w.mlp_norm, config.eps), w.mlp, config.activation)
    return x + h, cache


def head(config: Phi3Config, w: Any, x: Tensor) -> Tensor:
    return logits(rms_norm(x, w.final_norm, config.eps), w.head)  # f32[b, n, vocab]
