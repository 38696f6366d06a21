"""Causal self-attention over the cache, for any number of active tokens at any positions."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from transformers_neuronx import hlo
from transformers_neuronx.errors import ConfigError
from transformers_neuronx.layers.activation import softmax
from transformers_neuronx.layers.linear import linear, linears
from transformers_neuronx.layers.norm import rms_norm
from transformers_neuronx.layers.step import Cache, Step
from transformers_neuronx.layers.storage import stored
from transformers_neuronx.pyhlo import Tensor

LAYER_KINDS = ("full_attention", "sliding_attention")


def window_of(kind: str, size: int | None) -> int | None:
    """Return the window of a layer of `kind`, where sliding windows have `size`; None means no limit."""
    if kind == "sliding_attention" and size is None:
        raise ConfigError("a layer of type 'sliding_attention' needs a sliding_window, got None")
    return size if kind == "sliding_attention" else None


def attention(
    x: Tensor,
    w: Any,
    cache: Cache,
    step: Step,
    head_dim: int,
    rotate: Callable[[Tensor], Tensor] | None = None,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    norm_eps: float | None = None,
) -> tuple[Tensor, Cache]:
    """Project, cache, attend, project back. x [b, n, h] -> [b, n, h], and the cache with the active tokens in it.

    `w` has linear layers `q`, `k`, `v` and `out`; with `norm_eps` also norms `q_norm` and `k_norm` over a head's
    features. `alibi` f32[heads] are optional slopes by which scores fall with distance. `distances` f32[heads, ·] are
    optional biases per distance; the last one is for all larger distances. `rotate` is applied to queries and keys,
    [b, n, heads, d]. Scores are multiplied by `scale`, by default 1 / sqrt(d), and soft-capped at `softcap`. Tokens
    attend to `window` positions, including their own.
    """
    b, n, _ = x.sizes
    q, k, v = (hlo.reshape(y, b, n, -1, head_dim) for y in linears(x, w.q, w.k, w.v))
    if norm_eps is not None:
        q, k = rms_norm(q, w.q_norm, norm_eps), rms_norm(k, w.k_norm, norm_eps)
    q, k = (q, k) if rotate is None else (rotate(q), rotate(k))
    alibi, distances = ([getattr(w, name).tensor] if hasattr(w, name) else [] for name in ("alibi", "distances"))
    attend, window = _sparse(step, window)
    context, *after = attend(
        *(q, k, v, step.start, step.length, *cache, *([] if step.slots is None else [step.slots]), *alibi, *distances),
        width=step.width,
        scale=head_dim**-0.5 if scale is None else scale,
        arrays=len(cache),
        own_slots=step.slots is not None,
        alibi=bool(alibi),
        distances=bool(distances),
        window=window,
        softcap=softcap,
    )
    return linear(hlo.reshape(context, b, n, -1), w.out), tuple(after)


def _attend_body(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    length: Tensor,
    *more: Tensor,
    width: int,
    scale: float,
    arrays: int = 2,
    own_slots: bool = False,
    alibi: bool = False,
    distances: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    near: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Compute softmax(q Kᵀ scale) V over the positions up to each token's own, and the cache with k and v in it.

    q [b, n, heads, d]; k, v [b, n, kv_heads, d]; start, length s32[b] as in `Step`; the `arrays` of the cache; then, if
    given, slots s32[b], slopes f32[heads] and distance biases f32[heads, ·]. Positions from `width` on are not read.
    Each key head serves heads / kv_heads query heads. -> context [b, n, heads, d], and the cache
    """
    b, n, heads, d = q.sizes
    kv_heads, cache = k.sizes[2], more[:arrays]
    rows = more[arrays] if own_slots else hlo.iota("s32", [b])
    new = _as_cached([hlo.reshape(hlo.transpose(x, 0, 2, 1, 3), b * kv_heads, n, d) for x in (k, v)], cache)
    visible = [_write(hlo.slice(x, 1, 0, width), y, rows, start, length) for x, y in zip(cache, new, strict=True)]
    updated = [_copy_blocks(*pair, rows, start, kv_heads, n) for pair in zip(visible, cache, strict=True)]
    keys, values, *scales = [_of_slots(cached, rows, kv_heads) if own_slots else cached for cached in visible]
    scales = [hlo.reshape(each, -1, 1, width) for each in scales]
    q = hlo.reshape(hlo.transpose(q, 0, 2, 1, 3), b * kv_heads, -1, d)
    scores = hlo.dot(q, hlo.convert(keys, q.dtype), contract=([2], [2]), batch=([0], [0]), dtype="f32") * scale
    scores = hlo.reshape(scores * scales[0] if scales else scores, b, heads, n, width)
    slopes, biases = more[arrays + own_slots :][:alibi], more[len(more) - distances :]
    weights = hlo.reshape(_weights(scores, start, slopes, biases, window, softcap, near), *q.sizes[:2], width)
    weights = hlo.convert(weights * scales[1] if scales else weights, q.dtype)
    context = hlo.dot(weights, hlo.convert(values, q.dtype), contract=([2], [1]), batch=([0], [0]))
    return hlo.transpose(hlo.reshape(context, b, heads, n, d), 0, 2, 1, 3), *updated


_attend = hlo.composite("attention", _attend_body)


def _sparse(step: Step, window: int | None) -> tuple[Callable[..., Any], int | None]:
    """Return the function that attends by the step's pattern, and the window of a layer that has one of `window`."""
    if step.pattern is None or step.pattern.window is None:  # kernels know no blocks
        return (_attend if step.pattern is None else functools.partial(_attend_body, near=step.near)), window
    return _attend, step.pattern.window if window is None else min(window, step.pattern.window)


def _as_cached(new: Sequence[Tensor], cache: Sequence[Tensor]) -> list[Tensor]:
    """Convert keys and values to the arrays of the cache."""
    dtype = cache[0].dtype
    if dtype is new[0].dtype:
        return list(new)
    parts = [stored(x, dtype.name, scaled=len(cache) > 2) for x in new]
    return [part for both in zip(*parts, strict=True) for part in both]


def _weights(
    scores: Tensor,
    start: Tensor,
    slopes: Sequence[Tensor],
    biases: Sequence[Tensor],
    window: int | None,
    softcap: float | None,
    near: Tensor | None,
) -> Tensor:
    """Convert scores to probabilities over the positions that each token sees. f32[b, heads, n, width]"""
    b, heads, n, width = scores.sizes
    own = hlo.reshape(start, b, 1, 1, 1) + hlo.iota("s32", [b, 1, n, 1], 2)
    distance = own - hlo.iota("s32", [b, 1, n, width], 3)
    if softcap is not None:
        scores = hlo.tanh(scores * (1 / softcap)) * softcap
    for slope in slopes:
        scores = scores - hlo.reshape(slope, heads, 1, 1) * hlo.convert(distance, "f32")
    for bias in biases:
        place = hlo.clamp(0, hlo.reshape(distance, b, n, width), bias.sizes[1] - 1)
        scores = scores + hlo.transpose(hlo.take(hlo.transpose(bias, 1, 0), place), 0, 3, 1, 2)
    seen = distance >= 0
    if window is not None:
        seen = hlo.logical_and(seen, distance < window)
    if near is not None:
        seen = hlo.logical_and(seen, hlo.reshape(near, b, 1, n, width))
    scores = hlo.select(seen, scores, -math.inf)
    weights: Tensor = softmax(scores)
    return weights


def _write(cache: Tensor, new: Tensor, slots: Tensor, start: Tensor, length: Tensor) -> Tensor:
    """Write the first `length[i]` tokens of row `i` to slot `slots[i]` of the cache, from position `start[i]` on.

    cache [slots * heads, positions, d]; new [b * heads, n, d]. Row by row, a block of n positions is read, changed
    and written. XLA does this in place; for a scatter it would copy the cache.
    """
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


def _copy_blocks(source: Tensor, cache: Tensor, slots: Tensor, start: Tensor, heads: int, n: int) -> Tensor:
    """Copy the blocks that `_write` wrote to `source`, a copy of the cache's first positions, to `cache`.

    So all reads of the cache come before its writes; otherwise XLA copies the cache.
    """
    if source.sizes == cache.sizes:
        return source
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


def _of_slots(cache: Tensor, slots: Tensor, heads: int) -> Tensor:
    """Gather the rows of `slots`, s32[b]. [slots * heads, positions, d] -> [b * heads, positions, d]"""
    _, positions, d = cache.sizes
    found = hlo.take(hlo.reshape(cache, -1, heads, positions, d), slots)
    return hlo.reshape(found, -1, positions, d)
