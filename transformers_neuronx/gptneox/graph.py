"""GPT-NeoX's forward pass: rotary positions for a part of each head, attention parallel to or before the feed-forward.

Black et al., arXiv:2204.06745.
"""

from typing import Any

from transformers_neuronx.gptneox.config import GPTNeoXConfig
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


def embed(config: GPTNeoXConfig, w: Any, step: Step) -> Tensor:
    return embedding(w.embed, step.ids)  # [b, n, h]


def prepare(config: GPTNeoXConfig, step: Step) -> Rotate:
    return rotation(config.rotary, step)


def layer(config: GPTNeoXConfig, w: Any, x: Tensor, cache: Cache, step: Step, rotate: Rotate) -> tuple[Tensor, Cache]:
    h, cache = attention(layer_norm(x, w.attn_norm, config.eps), w.attn, cache, step, config.head_dim, rotate)
    x = step.needed_rows(x)
    attended = x + h
    h = layer_norm(x if config.parallel else attended, w.mlp_norm, config.eps)
    return attended + mlp(h, w.mlp, config.activation), cache


def norm(config: GPTNeoXConfig, w: Any, x: Tensor) -> Tensor:
    return layer_norm(x, w.final_norm, config.eps)


def head(config: GPTNeoXConfig, w: Any, x: Tensor) -> Tensor:
    return logits(norm(config, w, x), w.head)  # f32[b, n, vocab]
