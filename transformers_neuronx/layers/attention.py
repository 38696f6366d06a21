"""Causal self-attention over the cache, for any number of active tokens at any positions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from transformers_neuronx import hlo
from transformers_neuronx.errors import ConfigError
from transformers_neuronx.layers.activation import softmax_with_sinks
from transformers_neuronx.layers.cache import as_cached, keys_and_values, masked, put_at_once, put_by_rows
from transformers_neuronx.layers.linear import linear, linears
from transformers_neuronx.layers.norm import normalize_heads
from transformers_neuronx.layers.paged import paged_attention
from transformers_neuronx.layers.spread import attend_spread
from transformers_neuronx.layers.step import Cache, Step
from transformers_neuronx.pyhlo import Tensor

Rotate = Callable[[Tensor], Tensor]
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
    rotate: Rotate | tuple[Rotate, Rotate] | None = None,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    clip: float | None = None,
    norm_eps: float = 0.0,
    norm_last: bool = False,
    chunked: bool = False,
) -> tuple[Tensor, Cache]:
    """Project, cache, attend, project back. x [b, n, h] -> [b, n, h], and the cache with the active tokens in it.

    If a step says which tokens are needed, the result has only those: add it to `step.needed_rows(x)`.

    `w` has linear layers `q`, `k`, `v` and `out`, an optional layer `gate`, by whose sigmoid what heads return is
    multiplied, for each feature or each head, and optional norms `q_norm` and `k_norm` of queries and keys. `alibi`
    f32[heads] are optional slopes by which scores fall with distance. `distances` f32[heads, ·] are optional biases per
    distance; the last one is for all larger distances. `sinks` f32[heads] are optional scores of one more position,
    which every token sees, and which has no value. `rotate` is applied to queries and keys, [b, n, heads, d]; of two,
    each has its own. With `norm_last`, that comes before the norms. Scores are multiplied by `scale`, by default
    1 / sqrt(d), and soft-capped at `softcap`. Tokens attend to `window` positions, including their own; with
    `chunked`, to those of their chunk of `window` positions. Products with `q`, `k` and `v` are limited to the interval
    from -`clip` to `clip`.
    """
    q, k, v = heads_of(x, w, head_dim, rotate, clip=clip, norm_eps=norm_eps, norm_last=norm_last)
    return attend(x, q, k, v, w, cache, step, scale=scale, window=window, softcap=softcap, chunked=chunked)


def heads_of(
    x: Tensor,
    w: Any,
    head_dim: int,
    rotate: Rotate | tuple[Rotate, Rotate] | None,
    *,
    clip: float | None = None,
    norm_eps: float = 0.0,
    norm_last: bool = False,
) -> list[Tensor]:
    """Return queries, keys and values [b, n, ·, d] as `attention` makes them of x [b, n, h]; queries alone if `w` has
    no `k`. Without a `v`, values are what keys are before their norm and rotation. Values may have a norm, `v_norm`.
    """
    b, n, _ = x.sizes
    projected = linears(x, *(getattr(w, part) for part in "qkv" if hasattr(w, part)))
    limited = (y if clip is None else hlo.clamp(-clip, y, clip) for y in projected)
    heads = [hlo.reshape(y, b, n, -1, head_dim) for y in limited]
    turns = rotate if isinstance(rotate, tuple) else (rotate, rotate)
    how = zip([*heads, *heads[1:]][:3], ("q_norm", "k_norm", "v_norm"), (*turns, None), strict=False)
    return [_normed_and_turned(x, getattr(w, norm, None), norm_eps, turn, norm_last) for x, norm, turn in how]


def attend(
    x: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Any,
    cache: Cache,
    step: Step,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    chunked: bool = False,
) -> tuple[Tensor, Cache]:
    """Do the rest of what `attention` does, given queries, keys and values [b, n, ·, d]."""
    b, n, _, d = q.sizes
    scale = d**-0.5 if scale is None else scale
    rules: dict[str, Any] = dict(scale=scale, softcap=softcap) | (dict(chunk=window) if chunked else {})
    context, *after = attended(q, k, v, w, cache, step, None if chunked else window, **rules)
    context = step.needed_rows(hlo.reshape(context, b, n, -1))
    context = _gated(context, hlo.logistic(linear(step.needed_rows(x), w.gate)), d) if hasattr(w, "gate") else context
    return linear(context, w.out), tuple(after)


def _gated(context: Tensor, gates: Tensor, d: int) -> Tensor:
    """Multiply what heads return, [b, n, heads d], by gates of their features, or of each head, [b, n, heads]."""
    if gates.sizes != context.sizes:
        gates = hlo.broadcast_to(hlo.reshape(gates, *gates.sizes, 1), [*gates.sizes, d])
    return context * hlo.reshape(gates, *context.sizes)


def attended(
    q: Tensor, k: Tensor, v: Tensor | None, w: Any, cache: Cache, step: Step, window: int | None, **how: float | None
) -> tuple[Tensor, ...]:
    """Return the context of queries [b, n, heads, d], and the cache with keys and values [b, n, kv_heads, d] in it.

    Without v, keys are values, too, and the cache has them once.
    """
    of_slots, window = _attends(step, window)
    named = how | {name: getattr(w, name).tensor for name in ("alibi", "distances", "sinks") if hasattr(w, name)}
    made: tuple[Tensor, ...]
    if step.segments is not None:
        made = paged_attention(q, k, v, step.segments, cache, window=window, **named)
    else:
        where = step.start, step.length, cache, step.slots
        made = of_slots(q, k, v, *where, width=step.width, window=window, **named)
    return made


def _normed_and_turned(x: Tensor, norm: Any, eps: float, turn: Rotate | None, norm_last: bool) -> Tensor:
    """Apply the norm and the rotation that there are to queries or keys [b, n, heads, d]."""
    x = turn(x) if turn and norm_last else x
    x = normalize_heads(x, norm, eps) if norm else x
    return turn(x) if turn and not norm_last else x


def _attend_body(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    start: Tensor,
    length: Tensor,
    cache: Cache,
    slots: Tensor | None = None,
    alibi: Tensor | None = None,
    distances: Tensor | None = None,
    sinks: Tensor | None = None,
    near: Tensor | None = None,
    *,
    width: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    chunk: int | None = None,
    scatters: bool = False,
) -> tuple[Tensor, ...]:
    """Compute softmax(q Kᵀ scale) V over the positions up to each token's own, and the cache with k and v in it.

    q [b, n, heads, d]; k, v [b, n, kv_heads, d], or k that is both; start, length, slots s32[b] as in `Step`; alibi and
    sinks f32[heads]; distances f32[heads, ·]. Reads `width` positions. -> context [b, n, heads, d], and the cache
    """
    b, n, heads, d = q.sizes
    kv_heads = k.sizes[2]
    rows = hlo.iota("s32", [b]) if slots is None else slots
    new = as_cached([hlo.reshape(hlo.transpose(x, 0, 2, 1, 3), -1, n, d) for x in (k, v) if x is not None], cache)
    visible, updated = (put_at_once if scatters else put_by_rows)(cache, new, rows, start, length, width)
    keys, values, *scales = keys_and_values(visible, v, slots, kv_heads)
    scales = [hlo.reshape(each, -1, 1, width) for each in scales]
    q = hlo.reshape(hlo.transpose(q, 0, 2, 1, 3), b * kv_heads, -1, d)
    scores = hlo.dot(q, hlo.convert(keys, q.dtype), contract=([2], [2]), batch=([0], [0]), dtype="f32") * scale
    scores = hlo.reshape(scores * scales[0] if scales else scores, b, heads, n, width)
    scores = masked(scores, start, alibi, distances, window=window, softcap=softcap, near=near, chunk=chunk)
    weights = hlo.reshape(softmax_with_sinks(scores, sinks), *q.sizes[:2], width)
    weights = hlo.convert(weights * scales[1] if scales else weights, q.dtype)
    context = hlo.dot(weights, hlo.convert(values, q.dtype), contract=([2], [1]), batch=([0], [0]))
    return hlo.transpose(hlo.reshape(context, b, heads, n, d), 0, 2, 1, 3), *updated


_attend = hlo.composite("attention", _attend_body)


def _attends(step: Step, window: int | None) -> tuple[Callable[..., Any], int | None]:
    """Return the function for a step's pattern and devices, and the window of a layer that has one of `window`."""
    attend: Callable[..., Any] = functools.partial(_attend_body, scatters=True) if step.scatters else _attend
    blocks = step.pattern is not None and step.pattern.window is None
    if step.spread or blocks:  # kernels know neither
        body = functools.partial(_attend_body, scatters=step.scatters)
        attend = functools.partial(attend_spread, spread=step.spread) if step.spread else body
        attend = functools.partial(attend, near=step.near if blocks else None)
    if step.pattern is None or step.pattern.window is None:
        return attend, window
    return attend, step.pattern.window if window is None else min(window, step.pattern.window)
