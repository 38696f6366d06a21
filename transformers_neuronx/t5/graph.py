"""T5's forward pass: distance biases instead of positions, RMS norms, scores without a scale (arXiv:1910.10683)."""

from typing import Any

from transformers_neuronx.layers import (
    Cache,
    Memory,
    Step,
    attention,
    attention_over,
    distance_bias,
    embedding,
    gated_mlp,
    logits,
    mlp,
    remembered,
    rms_norm,
)
from transformers_neuronx.pyhlo import Tensor
from transformers_neuronx.t5.config import T5Config


def embed(config: T5Config, w: Any, step: Step) -> Tensor:
    return embedding(w.embed, step.ids)  # [b, n, h]


def layer(config: T5Config, w: Any, x: Tensor, cache: Cache, step: Step) -> tuple[Tensor, Cache]:
    h, cache = attention(rms_norm(x, w.attn_norm, config.eps), w.attn, cache, step, config.head_dim, scale=1.0)
    x = step.needed_rows(x) + h
    h = rms_norm(x, w.cross_norm, config.eps)
    x = x + attention_over(h, w.cross, w.memory._replace(slots=step.needed_slots), config.head_dim, scale=1.0)
    return x + feed_forward(config, w, x), cache


def norm(config: T5Config, w: Any, x: Tensor) -> Tensor:
    return rms_norm(x, w.final_norm, config.eps)


def head(config: T5Config, w: Any, x: Tensor) -> Tensor:
    x = norm(config, w, x)
    return logits(x * config.hidden_size**-0.5 if config.scaled_head else x, w.head)  # f32[b, n, vocab]


def embed_source(config: T5Config, w: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    return embedding(w.embed, ids), distance_bias(w.source.distances.tensor, ids.sizes[1])


def encoder_layer(config: T5Config, w: Any, x: Tensor, lengths: Tensor, bias: Tensor) -> Tensor:
    h = rms_norm(x, w.attn_norm, config.eps)
    source = remembered(h, w.attn, lengths, config.head_dim)
    x = x + attention_over(h, w.attn, source, config.head_dim, scale=1.0, bias=bias)
    return x + feed_forward(config, w, x)


def encoded(config: T5Config, w: Any, x: Tensor) -> Tensor:
    return rms_norm(x, w.source.final_norm, config.eps)


def memory(config: T5Config, w: Any, x: Tensor, lengths: Tensor) -> Memory:
    return remembered(x, w.cross, lengths, config.head_dim)  # for a layer of the decoder


def feed_forward(config: T5Config, w: Any, x: Tensor) -> Tensor:
    x = rms_norm(x, w.mlp_norm, config.eps)
    return gated_mlp(x, w.mlp, config.activation) if config.gated else mlp(x, w.mlp, config.activation)
