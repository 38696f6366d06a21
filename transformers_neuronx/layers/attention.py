"""Causal self-attention over the cache, for any number of active tokens at any positions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from transformers_neuronx import hlo
from transformers_neuronx.layers.linear import linear
from transformers_neuronx.layers.step import Cache, Step
from transformers_neuronx.pyhlo import Tensor


def attention(
    x: Tensor,
    w: Any,
    cache: Cache,
    step: Step,
    head_dim: int,
    rotate: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Cache]:
    """Project, cache, attend, project back. x [b, n, h] -> [b, n, h], and the cache with the active tokens in it.

    `w` has linear layers `q`, `k`, `v` and `out`; `rotate` is applied to queries and keys, [b, n, heads, d].
    """
    b, n, _ = x.sizes
    q, k, v = (hlo.reshape(linear(x, part), b, n, -1, head_dim) for part in (w.q, w.k, w.v))
    if rotate is not None:
        q, k = rotate(q), rotate(k)
    cache = cache.updated(k, v, step)
    keys, values = cache.keys, cache.values
    if step.slots is not None:
        keys, values = hlo.take(keys, step.slots), hlo.take(values, step.slots)
    context = _attend(q, keys, values, step.positions, width=step.width, scale=1 / math.sqrt(head_dim))
    return linear(hlo.reshape(context, b, n, -1), w.out), cache


def _attend_body(q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, width: int, scale: float) -> Tensor:
    """softmax(q Kᵀ scale) V over the positions up to each token's own, as far as `width`.

    q [b, n, heads, d]; keys, values [b, kv_heads, positions, d]; positions s32[b, n] -> [b, n, heads, d].
    Each key head serves heads / kv_heads query heads.
    """
    b, n, heads, d = q.sizes
    keys, values = (hlo.slice(cached, 2, 0, width) for cached in (keys, values))
    kv_heads = keys.sizes[1]
    group = heads // kv_heads
    q = hlo.transpose(hlo.reshape(q, b, n, kv_heads, group, d), 0, 2, 3, 1, 4)
    q = hlo.reshape(q, b, kv_heads, group * n, d)
    scores = hlo.dot(q, keys, contract=([3], [3]), batch=([0, 1], [0, 1]), dtype="f32") * scale
    scores = hlo.reshape(scores, b, kv_heads, group, n, width)
    seen = hlo.iota("s32", [b, n, width], 2) <= hlo.reshape(positions, b, n, 1)
    scores = hlo.select(hlo.reshape(seen, b, 1, 1, n, width), scores, -math.inf)
    probabilities = hlo.reshape(_softmax(scores), b, kv_heads, group * n, width)
    context = hlo.dot(hlo.convert(probabilities, values.dtype), values, contract=([3], [2]), batch=([0, 1], [0, 1]))
    context = hlo.transpose(hlo.reshape(context, b, kv_heads, group, n, d), 0, 3, 1, 2, 4)
    return hlo.reshape(context, b, n, heads, d)


_attend = hlo.composite("attention", _attend_body)


def _softmax(x: Tensor) -> Tensor:
    """Along the last axis."""
    e = hlo.exp(x - hlo.max(x, -1, keep=True))
    return e / hlo.sum(e, -1, keep=True)
