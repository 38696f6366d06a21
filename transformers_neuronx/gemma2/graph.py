"""Gemma 2's forward pass: norms before and after both blocks, soft caps, and a window in every second layer."""

import math
from typing import Any

from transformers_neuronx import hlo
from transformers_neuronx.gemma2.config import Gemma2Config
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
from transformers_neuronx.pyhlo import Tensor


def embed(config: Gemma2Config, w: Any, step: Step) -> Tensor:
    return embedding(w.embed, step.ids) * math.sqrt(config.hidden_size)  # [b, n, h]


def prepare(config: Gemma2Config, step: Step) -> Rotate:
    return rotation(config.rotary, step)


def layer(
    config: Gemma2Config, w: Any, x: Tensor, cache: Cache, step: Step, rotate: Rotate, kind: str
) -> tuple[Tensor, Cache]:
    h = rms_norm(x, w.attn_norm, config.eps)
    h, cache = attention(
        *(h, w.attn, cache, step, config.head_dim, rotate),
        scale=config.query_scale**-0.5,
        window=config.window_of(kind),
        softcap=config.softcap,
    )
    x = x + rms_norm(h, w.attn_out_norm, config.eps)
    h = gated_mlp(rms_norm(x, w.mlp_norm, config.eps), w.mlp, config.activation)
    return x + rms_norm(h, w.mlp_out_norm, config.eps), cache


def norm(config: Gemma2Config, w: Any, x: Tensor) -> Tensor:
    return rms_norm(x, w.final_norm, config.eps)


def head(config: Gemma2Config, w: Any, x: Tensor) -> Tensor:
    y = logits(norm(config, w, x), w.head)  # f32[b, n, vocab]
    return y if config.logit_softcap is None else hlo.tanh(y * (1 / config.logit_softcap)) * config.logit_softcap
