"""GPT-2's forward pass: learned positions, layer norms before attention and feed-forward (Radford et al., 2019)."""

from __future__ import annotations

from typing import Any

from transformers_neuronx.gpt2.config import GPT2Config
from transformers_neuronx.layers import Cache, Step, attention, embedding, layer_norm, logits, lookup, mlp
from transformers_neuronx.pyhlo import Tensor


def embed(config: GPT2Config, w: Any, step: Step) -> Tensor:
    return embedding(w.embed, step.ids) + lookup(w.positions, step.positions)  # [b, n, h]


def layer(config: GPT2Config, w: Any, x: Tensor, cache: Cache, step: Step, kind: str = "") -> tuple[Tensor, Cache]:
    h = layer_norm(x, w.attn_norm, config.eps)
    scale, window = config.scale(kind), config.window_of(kind)
    h, cache = attention(h, w.attn, cache, step, config.attention_heads.head_dim, scale=scale, window=window)
    x = step.needed_rows(x) + h
    h = mlp(layer_norm(x, w.mlp_norm, config.eps), w.mlp, config.activation)
    return x + h, cache


def norm(config: GPT2Config, w: Any, x: Tensor) -> Tensor:
    return layer_norm(x, w.final_norm, config.eps)


def head(config: GPT2Config, w: Any, x: Tensor) -> Tensor:
    return logits(norm(config, w, x), w.head)  # f32[b, n, vocab]
