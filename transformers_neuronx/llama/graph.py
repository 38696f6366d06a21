"""The forward pass of LLaMA and the families like it: rotary positions, grouped keys, norms, gated feed-forward.

The weight table says what a block has: a norm is there if it has weights, and a feed-forward is gated if it has a gate.
"""

from collections.abc import Mapping
from typing import Any

from transformers_neuronx import hlo
from transformers_neuronx.layers import (
    Cache,
    Rotate,
    Step,
    attention,
    embedding,
    experts,
    gated_mlp,
    latent_attention,
    logits,
    mlp,
    normalize,
    rotaries,
    rotation,
)
from transformers_neuronx.llama.hybrid import HybridLike
from transformers_neuronx.llama.latent import LatentLike
from transformers_neuronx.llama.like import LlamaLike
from transformers_neuronx.llama.mixture import MixtureLike
from transformers_neuronx.pyhlo import Tensor

Rotations = Mapping[str, Rotate | tuple[Rotate, Rotate] | None]  # by kind of layer


def embed(config: LlamaLike, w: Any, step: Step) -> Tensor:
    return scaled(embedding(w.embed, step.ids), config.embedding_scale)  # [b, n, h]


def prepare(config: LlamaLike, step: Step) -> Rotations:
    return {kind: rotation(rotary, step) if rotary else None for kind, rotary in rotaries(config).items()}


def layer(
    config: LlamaLike, w: Any, x: Tensor, cache: Cache, step: Step, rotate: Rotations, kind: str = ""
) -> tuple[Tensor, Cache]:
    before = normed(config, w, "attn_norm", x)
    h, cache = mix(config, w, before, cache, step, rotate[kind], config.window_of(kind))
    x = step.needed_rows(x)
    attended = x + scaled(normed(config, w, "attn_out_norm", h), config.residual_scale)
    if config.parallel:
        h = normed(config, w, "mlp_norm", x) if hasattr(w, "mlp_norm") else step.needed_rows(before)
    else:
        h = normed(config, w, "mlp_norm", attended)
    h = feed_forward(config, w, h)
    return attended + scaled(normed(config, w, "mlp_out_norm", h), config.residual_scale), cache


def mix(
    config: LlamaLike, w: Any, x: Tensor, cache: Cache, step: Step, rotate: Rotate | tuple[Rotate, Rotate] | None,
    window: int | None,
) -> tuple[Tensor, Cache]:  # fmt: skip
    if isinstance(config, HybridLike) and not hasattr(w, "attn"):
        return config.mixed(x, w, cache, step)
    if isinstance(config, LatentLike):
        assert rotate  # keys have a part that rotates, and all heads share it
        return latent_attention(x, w.attn, cache, step, rotate, config.head_dim, scale=config.attention_scale)
    return attention(
        *(x, w.attn, cache, step, config.head_dim, rotate),
        scale=config.attention_scale,
        window=window,
        softcap=config.softcap,
        clip=config.clip,
        norm_eps=config.eps,
        norm_last=config.qk_norm_last,
        chunked=config.chunked,
    )


def feed_forward(config: LlamaLike, w: Any, x: Tensor) -> Tensor:
    if isinstance(config, MixtureLike) and hasattr(w, "moe"):
        return experts(x, w.moe, config.router, config.activation)
    return (gated_mlp if hasattr(w.mlp, "gate") else mlp)(x, w.mlp, config.activation)


def norm(config: LlamaLike, w: Any, x: Tensor) -> Tensor:
    return normed(config, w, "final_norm", x)


def head(config: LlamaLike, w: Any, x: Tensor) -> Tensor:
    y = scaled(logits(norm(config, w, x), w.head), config.logit_scale)  # f32[b, n, vocab]
    cap = config.logit_softcap
    return y if cap is None else hlo.tanh(y * (1 / cap)) * cap


def normed(config: LlamaLike, w: Any, name: str, x: Tensor) -> Tensor:
    """Apply the norm of this name if the weights have it."""
    return normalize(x, getattr(w, name), config.eps) if hasattr(w, name) else x


def scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1 else x * factor
