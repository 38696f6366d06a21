"""BLOOM's forward pass: scores that fall with distance, and layer norms, also of the embeddings (arXiv:2211.05100)."""

from typing import Any

from transformers_neuronx.bloom.config import BloomConfig
from transformers_neuronx.layers import Cache, Step, attention, embedding, layer_norm, logits, mlp
from transformers_neuronx.pyhlo import Tensor


def embed(config: BloomConfig, w: Any, step: Step) -> Tensor:
    return layer_norm(embedding(w.embed, step.ids), w.embed_norm, config.eps)  # [b, n, h]


def layer(config: BloomConfig, w: Any, x: Tensor, cache: Cache, step: Step) -> tuple[Tensor, Cache]:
    normed = layer_norm(x, w.attn_norm, config.eps)
    h, cache = attention(normed, w.attn, cache, step, config.attention_heads.head_dim)
    x = step.needed_rows(normed if config.residual_after_norm else x) + h
    normed = layer_norm(x, w.mlp_norm, config.eps)
    h = mlp(normed, w.mlp, "gelu_new")
    return (normed if config.residual_after_norm else x) + h, cache


def norm(config: BloomConfig, w: Any, x: Tensor) -> Tensor:
    return layer_norm(x, w.final_norm, config.eps)


def head(config: BloomConfig, w: Any, x: Tensor) -> Tensor:
    return logits(norm(config, w, x), w.head)  # f32[b, n, vocab]
