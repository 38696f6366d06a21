"""OPT's forward pass: learned positions, layer norms before or after attention and feed-forward (arXiv:2205.01068)."""

from typing import Any

from transformers_neuronx.layers import (
    Cache,
    Step,
    attention,
    embedding,
    layer_norm,
    linear,
    logits,
    lookup,
    mlp,
)
from transformers_neuronx.opt.config import OPTConfig
from transformers_neuronx.pyhlo import Tensor


def embed(config: OPTConfig, w: Any, step: Step) -> Tensor:
    x = embedding(w.embed, step.ids)
    if config.projected:
        x = linear(x, w.project_in)
    return x + lookup(w.positions, step.positions + 2)  # [b, n, h]


def layer(config: OPTConfig, w: Any, x: Tensor, cache: Cache, step: Step) -> tuple[Tensor, Cache]:
    def norm(x: Tensor, weights: Any, here: bool) -> Tensor:
        return layer_norm(x, weights, config.eps) if here else x

    before, after = config.norm_before, not config.norm_before
    h, cache = attention(norm(x, w.attn_norm, before), w.attn, cache, step, config.attention_heads.head_dim)
    x = norm(step.needed_rows(x) + h, w.attn_norm, after)
    h = mlp(norm(x, w.mlp_norm, before), w.mlp, config.activation)
    return norm(x + h, w.mlp_norm, after), cache


def norm(config: OPTConfig, w: Any, x: Tensor) -> Tensor:
    if config.final_norm:
        x = layer_norm(x, w.final_norm, config.eps)
    return linear(x, w.project_out) if config.projected else x


def head(config: OPTConfig, w: Any, x: Tensor) -> Tensor:
    return logits(norm(config, w, x), w.head)  # f32[b, n, vocab]
