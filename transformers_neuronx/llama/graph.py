"""LLaMA's forward pass: rotary positions, grouped keys, RMS norms before attention and a gated feed-forward."""

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
from transformers_neuronx.llama.config import LlamaConfig
from transformers_neuronx.pyhlo import Tensor


def embed(config: LlamaConfig, w: Any, step: Step) -> Tensor:
    return embedding(w.embed, step.ids)  # [b, n, h]


def prepare(config: LlamaConfig, step: Step) -> Rotate:
    return rotation(config.rotary, step)


def layer(config: LlamaConfig, w: Any, x: Tensor, cache: Cache, step: Step, rotate: Rotate) -> tuple[Tensor, Cache]:
    h, cache = attention(rms_norm(x, w.attn_norm, config.eps), w.attn, cache, step, config.head_dim, rotate)
    x = x + h
    h = gated_mlp(rms_norm(x, w.mlp_norm, config.eps), w.mlp, config.activation)
    return x + h, cache


def head(config: LlamaConfig, w: Any, x: Tensor) -> Tensor:
    return logits(rms_norm(x, w.final_norm, config.eps), w.head)  # f32[b, n, vocab]
