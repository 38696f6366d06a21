"""Attention where the devices that would hold copies of the same keys divide their positions instead.

Each device attends to its own positions with the queries of its whole group; the parts are then joined.
"""

from __future__ import annotations

from typing import Any

from transformers_neuronx import hlo
from transformers_neuronx.layers.cache import as_cached, keys_and_values, masked, put_by_rows
from transformers_neuronx.layers.step import Cache, Spread
from transformers_neuronx.pyhlo import Tensor


def attend_spread(
    q: Tensor, k: Tensor, v: Tensor | None, start: Tensor, length: Tensor, cache: Cache, slots: Tensor | None = None,
    alibi: Tensor | None = None, distances: Tensor | None = None, sinks: Tensor | None = None,
    near: Tensor | None = None, *, spread: Spread, width: int, scale: float, **rules: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Do what the composite `attention` does, with a cache of ceil(positions / devices) positions and one key head."""
    b, n, own_heads, d = q.sizes
    heads, devices = own_heads * spread.devices, spread.devices
    rows = hlo.iota("s32", [b]) if slots is None else slots
    rank = hlo.remainder(hlo.convert(hlo.replica_id(), "s32"), devices)
    width = -(-width // devices)

    first = _passed(start, rank, devices)
    count = _passed(start + length, rank, devices) - first
    new = as_cached([_own_tokens(x, first, start, rank, devices) for x in (k, v) if x is not None], cache)
    visible, updated = put_by_rows(cache, new, rows, first, count, width)
    keys, values, *scales = keys_and_values(visible, v, slots, 1)
    scales = [hlo.reshape(each, b, 1, 1, width) for each in scales]

    q = hlo.all_gather(q, devices, 2, spread.degree)
    q = hlo.reshape(hlo.transpose(q, 0, 2, 1, 3), b, heads * n, d)
    scores = hlo.dot(q, hlo.convert(keys, q.dtype), contract=([2], [2]), batch=([0], [0]), dtype="f32") * scale
    scores = hlo.reshape(scores, b, heads, n, width)
    scores = scores * scales[0] if scales else scores
    alibi, distances, sinks = (
        None if x is None else hlo.all_gather(x, devices, 0, spread.degree) for x in (alibi, distances, sinks)
    )
    near = None if near is None else _at_places(near, rank, devices, width)
    places = hlo.iota("s32", [width]) * devices + rank
    scores = masked(scores, start, alibi, distances, near=near, places=places, **rules)

    weights, total, top = _weighed(scores, sinks, rank)
    weights = hlo.convert(hlo.reshape(weights * scales[1] if scales else weights, b, heads * n, width), q.dtype)
    context = hlo.dot(weights, hlo.convert(values, q.dtype), contract=([2], [1]), batch=([0], [0]), dtype="f32")
    context = _joined(hlo.reshape(context, b, heads, n, d), total, top, spread)
    return hlo.convert(hlo.transpose(context, 0, 2, 1, 3), q.dtype), *updated


def _weighed(scores: Tensor, sinks: Tensor | None, rank: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return weights of scores f32[b, heads, n, ·], their sums and their maxima, f32[b, heads, n, 1].

    Of a group of devices, the first one counts the sinks.
    """
    top = hlo.maximum(hlo.max(scores, -1, keep=True), -1e30)  # a device may see no position
    if sinks is None:
        weights = hlo.exp(scores - top)
        return weights, hlo.sum(weights, -1, keep=True), top
    sinks = hlo.reshape(sinks, -1, 1, 1)
    top = hlo.maximum(top, sinks)
    weights = hlo.exp(scores - top)
    of_sinks = hlo.select(hlo.equal(rank, 0), hlo.exp(sinks - top), 0.0)
    return weights, hlo.sum(weights, -1, keep=True) + of_sinks, top


def _joined(context: Tensor, total: Tensor, top: Tensor, spread: Spread) -> Tensor:
    """Join the parts of a softmax: each device's sums count by exp(own maximum - maximum of all).

    context f32[b, heads, n, d] and total f32[b, heads, n, 1], sums of exp(score - top) · value and of exp(score - top)
    over the device's positions -> f32[b, heads / devices, n, d], of the device's own heads
    """
    share = hlo.exp(top - hlo.all_reduce(top, spread.devices, "Maximum", spread.degree))
    sums = hlo.concatenate([context, total], 3) * share
    sums = hlo.reduce_scatter(sums, spread.devices, 1, spread.degree)
    return hlo.slice(sums, 3, 0, context.sizes[3]) / hlo.slice(sums, 3, context.sizes[3], context.sizes[3] + 1)


def _passed(positions: Tensor, rank: Tensor, devices: int) -> Tensor:
    """Return how many of the first `positions` s32[b] are on the device of this rank in its group."""
    return hlo.divide(positions - rank + (devices - 1), devices)


def _own_tokens(x: Tensor, first: Tensor, start: Tensor, rank: Tensor, devices: int) -> Tensor:
    """Take what the device keeps of new keys or values. [b, n, 1, d] -> [b, ceil(n / devices), d]"""
    b, n, _, d = x.sizes
    places = hlo.reshape(first, b, 1) + hlo.iota("s32", [b, -(-n // devices)], 1)  # in this device's cache
    tokens = hlo.clamp(0, places * devices + rank - hlo.reshape(start, b, 1), n - 1)
    return hlo.take(hlo.reshape(x, b * n, d), tokens + hlo.iota("s32", tokens.sizes, 0) * n)


def _at_places(near: Tensor, rank: Tensor, devices: int, width: int) -> Tensor:
    """Take the device's own of all positions. pred[b, n, positions] -> pred[b, n, width]"""
    b, n, positions = near.sizes
    padded = hlo.pad(near, 2, 0, width * devices - positions)
    zero = hlo.constant(0, "s32")
    own = hlo.dynamic_slice(hlo.reshape(padded, b, n, width, devices), [zero, zero, zero, rank], [b, n, width, 1])
    return hlo.reshape(own, b, n, width)
