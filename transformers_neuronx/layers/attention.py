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
    slots = () if step.slots is None else (step.slots,)
    context, keys, values = _attend(
        q, k, v, cache.keys, cache.values, step.start, step.length, *slots, width=step.width, scale=head_dim**-0.5
    )
    return linear(hlo.reshape(context, b, n, -1), w.out), Cache(keys, values)


def _attend_body(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    start: Tensor,
    length: Tensor,
    slots: Tensor | None = None,
    *,
    width: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """softmax(q Kᵀ scale) V over the positions up to each token's own, and the cache with k and v in it.

    q [b, n, heads, d]; k, v [b, n, kv_heads, d]; keys, values [slots * kv_heads, positions, d]; start, length,
    slots s32[b] as in `Step`; no position beyond `width` is looked at. Each head of keys serves heads / kv_heads
    of queries. -> context [b, n, heads, d], keys, values
    """
    b, n, heads, d = q.sizes
    kv_heads = k.sizes[2]
    k, v = (hlo.reshape(hlo.transpose(new, 0, 2, 1, 3), b * kv_heads, n, d) for new in (k, v))
    rows = hlo.iota("s32", [b]) if slots is None else slots
    updated = visible = [_write(cached, new, rows, start, length) for cached, new in ((keys, k), (values, v))]
    if width < keys.sizes[1]:
        # Cut first and written again: XLA would copy the whole of a cache that it has to cut after writing.
        cut = [(hlo.slice(cached, 1, 0, width), new) for cached, new in ((keys, k), (values, v))]
        visible = [_write(cached, new, rows, start, length) for cached, new in cut]
    if slots is not None:
        visible = [_of_slots(cached, slots, kv_heads) for cached in visible]
    group = heads // kv_heads
    q = hlo.reshape(hlo.transpose(q, 0, 2, 1, 3), b * kv_heads, group * n, d)
    scores = hlo.dot(q, visible[0], contract=([2], [2]), batch=([0], [0]), dtype="f32") * scale
    seen = hlo.iota("s32", [b, n, width], 2) <= hlo.reshape(start, b, 1, 1) + hlo.iota("s32", [b, n, 1], 1)
    scores = hlo.reshape(scores, b, heads, n, width)
    scores = hlo.select(hlo.reshape(seen, b, 1, n, width), scores, -math.inf)
    weights = hlo.convert(hlo.reshape(_softmax(scores), b * kv_heads, group * n, width), v.dtype)
    context = hlo.dot(weights, visible[1], contract=([2], [1]), batch=([0], [0]))
    context = hlo.transpose(hlo.reshape(context, b, heads, n, d), 0, 2, 1, 3)
    return context, updated[0], updated[1]


_attend = hlo.composite("attention", _attend_body)


def _write(cache: Tensor, new: Tensor, slots: Tensor, start: Tensor, length: Tensor) -> Tensor:
    """`cache` with the first `length[i]` tokens of row `i` at slot `slots[i]` from position `start[i]` on.

    cache [slots * heads, positions, d]; new [b * heads, n, d]. Row by row, a block of n positions is read, changed
    and written, which XLA does in place; for a scatter it would copy the cache.
    """
    rows, n, d = start.sizes[0], *new.sizes[1:]
    heads = new.sizes[0] // rows
    # A block that would stick out of the cache is moved back by `shift`, and the new tokens in it forward.
    first = hlo.minimum(start, cache.sizes[1] - n)
    shift = start - first
    offset = hlo.iota("s32", [1, n, 1], 1)
    for row in range(rows):
        slot, at, moved, count = (hlo.reshape(hlo.slice(x, 0, row, row + 1)) for x in (slots, first, shift, length))
        where: list[hlo.Operand] = [slot * heads, at, 0]
        old = hlo.dynamic_slice(cache, where, [heads, n, d])
        block = hlo.slice(new, 0, row * heads, (row + 1) * heads)
        if n > 1:
            block = hlo.dynamic_slice(hlo.pad(block, 1, n, 0), [0, n - moved, 0], [heads, n, d])
        real = hlo.logical_and(offset >= moved, offset < moved + count)
        cache = hlo.dynamic_update_slice(cache, hlo.select(real, block, old), where)
    return cache


def _of_slots(cache: Tensor, slots: Tensor, heads: int) -> Tensor:
    """The rows of `slots`, s32[b]. [slots * heads, positions, d] -> [b * heads, positions, d]"""
    _, positions, d = cache.sizes
    found = hlo.take(hlo.reshape(cache, -1, heads, positions, d), slots)
    return hlo.reshape(found, -1, positions, d)


def _softmax(x: Tensor) -> Tensor:
    """Along the last axis."""
    e = hlo.exp(x - hlo.max(x, -1, keep=True))
    return e / hlo.sum(e, -1, keep=True)
