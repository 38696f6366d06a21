"""Attention to complete sequences: an encoder's self-attention, and a decoder's cross-attention."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from transformers_neuronx import hlo
from transformers_neuronx.layers.attention import Rotate
from transformers_neuronx.layers.linear import linear, linears
from transformers_neuronx.pyhlo import Tensor


class Memory(NamedTuple):
    """Keys and values [memories, m, kv_heads, d] that a layer attends to: the first `lengths` s32[memories] of each.

    `slots` s32[b] has the memory of each row; by default row i has memory i.
    """

    keys: Tensor
    values: Tensor
    lengths: Tensor
    slots: Tensor | None = None


def remembered(x: Tensor, w: Any, lengths: Tensor, head_dim: int, rotate: Rotate | None = None) -> Memory:
    """Project a sequence x [b, m, h] to keys and values, with the linear layers `k` and `v` of `w`. `rotate` is applied
    to keys [b, m, heads, d].
    """
    b, m, _ = x.sizes
    keys, values = (hlo.reshape(y, b, m, -1, head_dim) for y in linears(x, w.k, w.v))
    return Memory(rotate(keys) if rotate else keys, values, lengths)


def attention_over(
    x: Tensor, w: Any, memory: Memory, head_dim: int, rotate: Rotate | None = None, *, scale: float | None = None,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Project, attend to all of the memory, project back. x [b, n, h] -> [b, n, h]

    `w` has linear layers `q` and `out`; `rotate` is applied to queries [b, n, heads, d]; `scale` and `bias` are those
    of `attend_to`.
    """
    b, n, _ = x.sizes
    q = hlo.reshape(linear(x, w.q), b, n, -1, head_dim)
    q = rotate(q) if rotate else q
    return linear(hlo.reshape(attend_to(q, memory, scale=scale, bias=bias), b, n, -1), w.out)


def attend_to(q: Tensor, memory: Memory, *, scale: float | None = None, bias: Tensor | None = None) -> Tensor:
    """Compute softmax(q Kᵀ scale + biasᵀ) V. q [b, n, heads, d] -> [b, n, heads, features of values]

    `scale` is by default 1 / sqrt(d); bias f32[b or 1, heads or 1, m, n or 1]. Each key head serves heads / kv_heads
    query heads. Queries that see no key, because the length is 0 or the biases are -inf, get zeros.
    """
    scale = q.sizes[-1] ** -0.5 if scale is None else scale
    context: Tensor = _attend_to(q, *memory, bias, scale=scale)
    return context


def _attend_to_body(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    slots: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    scale: float = 1.0,
) -> Tensor:
    if slots is not None:
        keys, values, lengths = (hlo.take(x, slots) for x in (keys, values, lengths))
    b, n, heads, d = q.sizes
    m, kv_heads = keys.sizes[1:3]
    q = hlo.reshape(hlo.transpose(q, 0, 2, 1, 3), b, kv_heads, -1, d)
    keys, values = (hlo.transpose(x, 0, 2, 1, 3) for x in (keys, values))  # [b, kv_heads, m, d]
    summed = q.dtype if q.dtype.element.bits > 32 else "f32"
    scores = hlo.dot(q, keys, contract=([3], [3]), batch=([0, 1], [0, 1]), dtype=summed) * scale
    scores = hlo.reshape(scores, b, heads, n, m)
    if bias is not None:
        scores = scores + hlo.convert(hlo.transpose(bias, 0, 1, 3, 2), scores.dtype)
    seen = hlo.iota("s32", [b, 1, 1, m], 3) < hlo.reshape(lengths, b, 1, 1, 1)
    scores = hlo.select(seen, scores, -math.inf)
    largest = hlo.max(scores, -1, keep=True)
    e = hlo.exp(scores - hlo.select(hlo.equal(largest, -math.inf), 0.0, largest))
    total = hlo.sum(e, -1, keep=True)
    weights = hlo.convert(e / hlo.select(hlo.equal(total, 0.0), 1.0, total), q.dtype)
    weights = hlo.reshape(weights, b, kv_heads, -1, m)
    context = hlo.dot(weights, values, contract=([3], [2]), batch=([0, 1], [0, 1]))
    return hlo.transpose(hlo.reshape(context, b, heads, n, -1), 0, 2, 1, 3)


_attend_to = hlo.composite("attend_to", _attend_to_body)
