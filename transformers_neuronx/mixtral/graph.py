"""Mixtral's forward pass: Mistral with a mixture of experts as its feed-forward."""

from typing import Any

from transformers_neuronx.layers import (
    Cache,
    Rotate,
    Step,
    attention,
    embedding,
    experts,
    logits,
    rms_norm,
    rotation,
)
from transformers_neuronx.mixtral.config import MixtralConfig
from transformers_neuronx.pyhlo import Tensor


def embed(config: MixtralConfig, w: Any, step: Step) -> Tensor:
    return embedding(w.embed, step.ids)  # [b, n, h]


def prepare(config: MixtralConfig, step: Step) -> Rotate:
    return rotation(config.rotary, step)


def layer(config: MixtralConfig, w: Any, x: Tensor, cache: Cache, step: Step, rotate: Rotate) -> tuple[Tensor, Cache]:
    h = rms_norm(x, w.attn_norm, config.eps)
    h, cache = attention(h, w.attn, cache, step, config.head_dim, rotate, window=config.window)
    x = x + h
    h = rms_norm(x, w.mlp_norm, config.eps)
    h = experts(h, w.moe, config.router, config.activation)
    return x + h, cache


def norm(config: MixtralConfig, w: Any, x: Tensor) -> Tensor:
    return rms_norm(x, w.final_norm, config.eps)


def head(config: MixtralConfig, w: Any, x: Tensor) -> Tensor:
    return logits(norm(config, w, x), w.head)  # f32[b, n, vocab]
