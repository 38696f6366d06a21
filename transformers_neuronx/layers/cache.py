"""Reads and writes of a layer's cache, and which of its positions each token sees, as HLO operations."""

from __future__ import annotations

import math
from collections.abc import Sequence

from transformers_neuronx import hlo
from transformers_neuronx.layers.storage import stored
from transformers_neuronx.pyhlo import Tensor


def as_cached(new: Sequence[Tensor], cache: Sequence[Tensor]) -> list[Tensor]:
    """Convert keys and values to the arrays of the cache."""
    dtype = cache[0].dtype
    if dtype is new[0].dtype:
        return list(new)
    parts = [stored(x, dtype.name, scaled=len(cache) > len(new)) for x in new]
    return [part for both in zip(*parts, strict=True) for part in both]


def keys_and_values(
    arrays: Sequence[Tensor], v: Tensor | None, slots: Tensor | None = None, heads: int = 1
) -> Sequence[Tensor]:
    """Return keys, values, and the scales of both if there are any, given the arrays of a cache; those of `slots`.

    Without new values `v`, the cache has keys alone, which are values, too.
    """
    arrays = arrays if slots is None else [of_slots(each, slots, heads) for each in arrays]
    return arrays if v is not None else [each for each in arrays for _ in range(2)]


def masked(
    scores: Tensor,
    start: Tensor,
    alibi: Tensor | None,
    distances: Tensor | None,
    *,
    window: int | None,
    softcap: float | None,
    near: Tensor | None,
    chunk: int | None = None,
    places: Tensor | None = None,
) -> Tensor:
    """Cap scores, add biases, and set those of positions that a token does not see to -inf. f32[b, heads, n, width]

    `alibi` f32[heads] are slopes by which scores fall with distance, `distances` f32[heads, ·] are biases per distance.
    Tokens see no position of an earlier chunk of `chunk` positions. `places` s32[width] are the positions of the keys,
    by default 0, 1, …
    """
    b, heads, n, width = scores.sizes
    own = hlo.reshape(start, b, 1, 1, 1) + hlo.iota("s32", [b, 1, n, 1], 2)
    places = hlo.iota("s32", [width]) if places is None else places
    distance = own - hlo.reshape(places, 1, 1, 1, width)  # [b, 1, n, width]
    if softcap is not None:
        scores = hlo.tanh(scores * (1 / softcap)) * softcap
    if alibi is not None:
        scores = scores - hlo.reshape(alibi, heads, 1, 1) * hlo.convert(distance, "f32")
    if distances is not None:
        place = hlo.clamp(0, hlo.reshape(distance, b, n, width), distances.sizes[1] - 1)
        scores = scores + hlo.transpose(hlo.take(hlo.transpose(distances, 1, 0), place), 0, 3, 1, 2)
    seen = distance >= 0
    if window is not None:
        seen = hlo.logical_and(seen, distance < window)
    if chunk is not None:
        seen = hlo.logical_and(seen, distance <= hlo.remainder(own, chunk))
    if near is not None:
        seen = hlo.logical_and(seen, hlo.reshape(near, b, 1, n, width))
    return hlo.select(seen, scores, -math.inf)


def put_by_rows(
    cache: Sequence[Tensor], new: Sequence[Tensor], slots: Tensor, start: Tensor, length: Tensor, width: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Write the first `length[i]` tokens of row `i` to slot `slots[i]` of the cache, from position `start[i]` on.

    cache [slots * heads, positions, d]; new [b * heads, n, d]. Row by row, a block of n positions is read, changed
    and written. XLA:CPU does this in place; for a scatter it would copy the cache.
    -> arrays like the cache with its first `width` positions, and the cache
    """
    visible = [_write(hlo.slice(x, 1, 0, width), y, slots, start, length) for x, y in zip(cache, new, strict=True)]
    return visible, [_copy_blocks(*each, slots, start) for each in zip(visible, cache, new, strict=True)]


def put_at_once(
    cache: Sequence[Tensor], new: Sequence[Tensor], slots: Tensor, start: Tensor, length: Tensor, width: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Do what `put_by_rows` does with one scatter for each array, which GPUs do in place.

    There, a block of each row would be two kernels in every layer, and minutes of compiling for many rows.
    """
    rows, n = start.sizes[0], new[0].sizes[1]
    heads = new[0].sizes[0] // rows
    slots, start, length = (hlo.reshape(x, rows, 1, 1) for x in (slots, start, length))
    head, token = (hlo.iota("s32", [rows, heads, n], axis) for axis in (1, 2))
    at = slots * heads + head, hlo.select(token < length, start + token, cache[0].sizes[1])
    where = hlo.concatenate([hlo.reshape(x, rows * heads, n, 1) for x in at], 2)
    after = [hlo.scatter_rows(x, where, y, [0, 1]) for x, y in zip(cache, new, strict=True)]
    return [hlo.slice(x, 1, 0, width) for x in after], after


def _write(cache: Tensor, new: Tensor, slots: Tensor, start: Tensor, length: Tensor) -> Tensor:
    rows, n, d = start.sizes[0], *new.sizes[1:]
    heads = new.sizes[0] // rows
    offset = hlo.iota("s32", [1, n, 1], 1)
    for row, where in enumerate(_blocks(cache, slots, start, heads, n)):
        # A block past the end of the cache is moved back, so the new tokens are further on inside it.
        moved, count = _scalar(start, row) - where[1], _scalar(length, row)
        block = hlo.slice(new, 0, row * heads, (row + 1) * heads)
        if n > 1:
            block = hlo.dynamic_slice(hlo.pad(block, 1, n, 0), [0, n - moved, 0], [heads, n, d])
        real = hlo.logical_and(offset >= moved, offset < moved + count)
        old = hlo.dynamic_slice(cache, where, [heads, n, d])
        cache = hlo.dynamic_update_slice(cache, hlo.select(real, block, old), where)
    return cache


def _copy_blocks(source: Tensor, cache: Tensor, new: Tensor, slots: Tensor, start: Tensor) -> Tensor:
    """Copy the blocks of `new` that were written to `source`, a copy of the cache's first positions, to `cache`.

    So all reads of the cache come before its writes; otherwise XLA copies the cache.
    """
    if source.sizes == cache.sizes:
        return source
    heads, n = new.sizes[0] // start.sizes[0], new.sizes[1]
    for where in _blocks(source, slots, start, heads, n):
        block = hlo.dynamic_slice(source, where, [heads, n, cache.sizes[2]])
        cache = hlo.dynamic_update_slice(cache, block, where)
    return cache


def _blocks(cache: Tensor, slots: Tensor, start: Tensor, heads: int, n: int) -> list[list[Tensor]]:
    """Return where each row's n positions from `start` on begin in `cache`, moved back where they pass its end."""
    first = hlo.minimum(start, cache.sizes[1] - n)
    zero = hlo.constant(0, "s32")
    return [[_scalar(slots, row) * heads, _scalar(first, row), zero] for row in range(start.sizes[0])]


def _scalar(x: Tensor, row: int) -> Tensor:
    return hlo.reshape(hlo.slice(x, 0, row, row + 1))


def of_slots(cache: Tensor, slots: Tensor, heads: int) -> Tensor:
    """Gather the rows of `slots`, s32[b]. [slots * heads, positions, d] -> [b * heads, positions, d]"""
    _, positions, d = cache.sizes
    found = hlo.take(hlo.reshape(cache, -1, heads, positions, d), slots)
    return hlo.reshape(found, -1, positions, d)
