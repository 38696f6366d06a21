"""GPT-J's forward pass: rotary positions for a part of each head, one layer norm, parallel attention and feed-forward.

Wang and Komatsuzaki, https://github.com/kingoflolz/mesh-transformer-jax.
"""

from typing import Any

from transformers_neuronx.gptj.config import GPTJConfig
from transformers_neuronx.layers import (
    Cache,
    Rotate,
    Step,
    attention,
    embedding,
    layer_norm,
    logits,
    mlp,
    rotation,
)
from transformers_neuronx.pyhlo import Tensor


def embed(config: GPTJConfig, w: Any, step: Step) -> Tensor:
    return embedding(w.embed, step.ids)  # [b, n, h]


def prepare(config: GPTJConfig, step: Step) -> Rotate:
    return rotation(config.rotary, step)


def layer(config: GPTJConfig, w: Any, x: Tensor, cache: Cache, step: Step, rotate: Rotate) -> tuple[Tensor, Cache]:
    h = layer_norm(x, w.norm, config.eps)
    attended, cache = attention(h, w.attn, cache, step, config.attention_heads.head_dim, rotate)
    x, h = step.needed_rows(x), step.needed_rows(h)
    return x + attended + mlp(h, w.mlp, config.activation), cache


def norm(config: GPTJConfig, w: Any, x: Tensor) -> Tensor:
    return layer_norm(x, w.final_norm, config.eps)


def head(config: GPTJConfig, w: Any, x: Tensor) -> Tensor:
    return logits(norm(config, w, x), w.head)  # f32[b, n, vocab]
