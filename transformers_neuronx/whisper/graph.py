"""Whisper's forward pass: a decoder that attends to features of sound, and its encoder (arXiv:2212.04356)."""

from typing import Any

from transformers_neuronx import hlo
from transformers_neuronx.layers import (
    ACTIVATIONS,
    Cache,
    Memory,
    Step,
    attention,
    attention_over,
    embedding,
    layer_norm,
    logits,
    lookup,
    mlp,
    remembered,
)
from transformers_neuronx.pyhlo import Tensor
from transformers_neuronx.whisper.config import WhisperConfig

EPS = 1e-5


def embed(config: WhisperConfig, w: Any, step: Step) -> Tensor:
    # Transformers computes the scale that `scale_embedding` asks for, and does not apply it.
    return embedding(w.embed, step.ids) + lookup(w.positions, step.positions)  # [b, n, h]


def layer(config: WhisperConfig, w: Any, x: Tensor, cache: Cache, step: Step) -> tuple[Tensor, Cache]:
    head_dim = config.attention_heads.head_dim
    h, cache = attention(layer_norm(x, w.attn_norm, EPS), w.attn, cache, step, head_dim)
    x = step.needed_rows(x) + h
    h = layer_norm(x, w.cross_norm, EPS)
    x = x + attention_over(h, w.cross, w.memory._replace(slots=step.needed_slots), head_dim)
    return x + feed_forward(config, w, x), cache


def norm(config: WhisperConfig, w: Any, x: Tensor) -> Tensor:
    return layer_norm(x, w.final_norm, EPS)


def head(config: WhisperConfig, w: Any, x: Tensor) -> Tensor:
    return logits(norm(config, w, x), w.head)  # f32[b, n, vocab]


def embed_source(config: WhisperConfig, w: Any, features: Tensor) -> tuple[Tensor, None]:
    x = convolved(features, w.source.conv1, 1)  # of [b, mel bins, frames]
    x = hlo.transpose(convolved(x, w.source.conv2, 2), 0, 2, 1)
    return x + w.source.positions.tensor, None  # [b, m, h]


def encoder_layer(config: WhisperConfig, w: Any, x: Tensor, lengths: Tensor, _: None) -> Tensor:
    head_dim = config.hidden_size // config.encoder_n_head
    h = layer_norm(x, w.attn_norm, EPS)
    x = x + attention_over(h, w.attn, remembered(h, w.attn, lengths, head_dim), head_dim)
    x = x + feed_forward(config, w, x)
    # As in Transformers, whose f16 has no infinity here.
    return hlo.clamp(-64504.0, x, 64504.0) if x.dtype.name == "f16" else x


def encoded(config: WhisperConfig, w: Any, x: Tensor) -> Tensor:
    return layer_norm(x, w.source.final_norm, EPS)


def memory(config: WhisperConfig, w: Any, x: Tensor, lengths: Tensor) -> Memory:
    return remembered(x, w.cross, lengths, config.attention_heads.head_dim)  # for a layer of the decoder


def feed_forward(config: WhisperConfig, w: Any, x: Tensor) -> Tensor:
    return mlp(layer_norm(x, w.mlp_norm, EPS), w.mlp, config.activation)


def convolved(x: Tensor, w: Any, stride: int) -> Tensor:
    """Convolve x [b, in, n] over three positions, zeros past its ends, and apply GELU. -> [b, out, n / stride]"""
    y = hlo.convolution(x, w.weight.tensor, [stride], [(1, 1)], [1], [1], dtype="f32")
    y = hlo.convert(y + hlo.reshape(hlo.convert(w.bias.tensor, "f32"), 1, -1, 1), x.dtype)
    return ACTIVATIONS["gelu"](y)
