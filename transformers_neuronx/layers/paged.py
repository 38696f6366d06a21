"""Causal self-attention of single tokens over a cache in pages."""

from __future__ import annotations

from transformers_neuronx import hlo
from transformers_neuronx.layers.activation import softmax_with_sinks
from transformers_neuronx.layers.cache import as_cached, keys_and_values, masked
from transformers_neuronx.layers.rows import columns, field
from transformers_neuronx.layers.step import SEGMENT, Cache, located, segment_row
from transformers_neuronx.pyhlo import Tensor


def _paged_attention_body(
    q: Tensor, k: Tensor, v: Tensor | None, segments: Tensor, cache: Cache,
    alibi: Tensor | None = None, distances: Tensor | None = None, sinks: Tensor | None = None, *,
    scale: float, window: int | None = None, softcap: float | None = None, chunk: int | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Write k and v to the cache, and compute softmax(q Kᵀ scale) V over each token's positions up to its own.

    q [b, 1, heads, d]; k, v [b, 1, kv_heads, d]; segments as in `Step`; cache [pages * kv_heads, page, ·] each; alibi
    and sinks f32[heads]; distances f32[heads, ·]. Tokens of no segment write nothing, and their context is 0. Without
    v, keys are values, too, and the cache has them once.
    -> context [b, 1, heads, d], and the cache

    This defines the result. A kernel reads pages in place; here they are gathered for each token.
    """
    b, _, heads, d = q.sizes
    kv_heads, page = k.sizes[2], cache[0].sizes[1]
    real, segment, position = located(segments, b)
    row = segment_row(segments.sizes[1] - columns(SEGMENT))
    pages = hlo.take(field(segments, row, "pages"), segment)  # s32[b, ·]
    positions = pages.sizes[1] * page
    own = hlo.select(real, hlo.take_rows(pages, hlo.divide(position, page)), -1)
    offset = hlo.remainder(position, page)
    new = as_cached([hlo.transpose(x, 0, 2, 1, 3) for x in (k, v) if x is not None], cache)
    updated = [_written(x, y, own, offset) for x, y in zip(cache, new, strict=True)]

    gathered = [hlo.take(hlo.reshape(x, -1, kv_heads, page, x.sizes[2]), pages) for x in updated]
    visible = [hlo.reshape(hlo.transpose(x, 0, 2, 1, 3, 4), b * kv_heads, positions, -1) for x in gathered]
    keys, values, *scales = keys_and_values(visible, v)
    scales = [hlo.reshape(each, -1, 1, positions) for each in scales]
    q = hlo.reshape(q, b * kv_heads, -1, d)
    scores = hlo.dot(q, hlo.convert(keys, q.dtype), contract=([2], [2]), batch=([0], [0]), dtype="f32") * scale
    scores = hlo.reshape(scores * scales[0] if scales else scores, b, heads, 1, positions)
    scores = masked(scores, position, alibi, distances, window=window, softcap=softcap, near=None, chunk=chunk)
    weights = hlo.reshape(softmax_with_sinks(scores, sinks), b * kv_heads, -1, positions)
    weights = hlo.convert(weights * scales[1] if scales else weights, q.dtype)
    context = hlo.dot(weights, hlo.convert(values, q.dtype), contract=([2], [1]), batch=([0], [0]))
    context = hlo.select(hlo.reshape(real, b, 1, 1, 1), hlo.reshape(context, b, 1, heads, d), 0.0)
    return context, *updated


paged_attention = hlo.composite("paged_attention", _paged_attention_body)


def _written(cache: Tensor, new: Tensor, page: Tensor, offset: Tensor) -> Tensor:
    """Write each of `new` [b, kv_heads, 1, ·] to place `offset` of its `page`, s32[b]; outside of pages, nowhere."""
    b, kv_heads, _, d = new.sizes
    by_page = hlo.reshape(cache, -1, kv_heads, *cache.sizes[1:])
    places = hlo.concatenate([hlo.reshape(x, b, 1) for x in (page, offset)], 1)
    return hlo.reshape(hlo.scatter_rows(by_page, places, hlo.reshape(new, b, kv_heads, d), (0, 2)), *cache.sizes)
