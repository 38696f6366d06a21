"""Mamba-2: linear attention over a memory of each head that fades, with a skip and a gated norm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from transformers_neuronx import hlo
from transformers_neuronx.layers.activation import silu
from transformers_neuronx.layers.linear import linear
from transformers_neuronx.layers.linear_attention import LinearAttention, convolved, of_heads, softplus
from transformers_neuronx.layers.state import scan_sequences
from transformers_neuronx.layers.step import Cache, Step
from transformers_neuronx.pyhlo import Tensor


def mamba(
    x: Tensor,
    w: Any,
    cache: Cache,
    step: Step,
    sizes: LinearAttention,
    eps: float,
    activation: str = "silu",
    scales: Mapping[str, float] = MappingProxyType({}),
    norm_first: bool = False,
) -> tuple[Tensor, Cache]:
    """Project, convolve, write to the memory and read it, gate, norm, project back. [b, n, h] -> [b, n, h], and states

    Dao and Gu, arXiv:2405.21060, whose C, B, x and Δ are queries, keys, values and `delta` here; `key_heads` of `sizes`
    are groups. `w` has what `convolved` takes, linear layers `gate` and `delta`, of heads, and `out`; `rate`,
    `delta_bias` and `skip`, f32[value_heads]; and the norm `norm` of the features of a group, if there is one, which
    may be `norm_first`, before the gate. `scales` are factors of projections, by name. `cache` are the `states` of
    `sizes`.
    """
    (q, k, v), after = convolved(x, w, cache, step, sizes, activation, scales)
    wanted = (x, w.delta), (step.needed_rows(x), w.gate)
    delta, gate = (hlo.convert(linear(*each), "f32") for each in wanted)
    delta, gate = (y * scales[part] if part in scales else y for part, y in (("delta", delta), ("gate", gate)))
    delta = softplus(delta + w.delta_bias.tensor)
    decay = hlo.negate(hlo.exp(w.rate.tensor)) * delta
    y, memory = selective_scan(q, k, v, decay, delta, step.sequences, cache[3], together=step.segments is None)
    y = step.needed_rows(y + v * hlo.reshape(w.skip.tensor, -1, 1))
    gate = silu(hlo.reshape(gate, *y.sizes))
    y = y if norm_first else y * gate
    y = _normed(y, w, sizes, eps) if hasattr(w, "norm") else y
    y = y * gate if norm_first else y
    return linear(hlo.convert(hlo.reshape(y, *y.sizes[:2], -1), x.dtype), w.out), (*after, memory)


def _normed(y: Tensor, w: Any, sizes: LinearAttention, eps: float) -> Tensor:
    """Divide features [b, n, heads, e] by the root of the mean square of their group, and multiply by their weight.

    If groups are divided among devices, `w.groups`, f32[heads, groups], says with ones which head is in which.
    """
    weight, count = w.norm.weight, sizes.value_heads // sizes.key_heads * sizes.value_dim
    squares = hlo.sum(y * y, -1)  # [b, n, heads]
    whole = sizes.heads.copies(weight.degree) == 1
    if whole:
        b, n, heads = squares.sizes
        grouped = hlo.reshape(squares, b, n, -1, sizes.heads.group)
        squares = hlo.reshape(hlo.broadcast_to(hlo.sum(grouped, -1, keep=True), grouped.sizes), b, n, heads)
    else:
        groups = w.groups.tensor
        sums = hlo.all_reduce(hlo.dot(squares, groups, contract=([2], [0])), weight.degree)
        squares = hlo.dot(sums, groups, contract=([2], [1]))
    y = y * hlo.reshape(hlo.rsqrt(squares * (1 / count) + eps), *squares.sizes, 1)
    return y * hlo.reshape(weight.tensor, *y.sizes[2:])


def _selective_scan_body(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, table: Tensor, memory: Tensor, *, together: bool
) -> tuple[Tensor, Tensor]:
    """Let each token fade the memory, add its value at its key, and read the memory for its query.

    q, k f32[b, n, key_heads, d]; v f32[b, n, value_heads, e]; decay f32[b, n, value_heads], the logarithm of what is
    left of the memory; beta alike, how much of the value is added; memory f32[places, value_heads, d, e]; table and
    `together` as in `scan_sequences`. -> f32[b, n, value_heads, e], and the memory after the step
    """
    y, [after] = scan_sequences(_cell, [v, q, k, decay, beta], [memory], table, together)
    return y, after


selective_scan = hlo.composite("selective_scan", _selective_scan_body)


def _cell(inputs: Sequence[Tensor], states: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Do that for one token of each row. v [b, heads, e]; q, k [b, key_heads, d]; memory [b, heads, d, e]"""
    [v, q, k, decay, beta], [memory] = inputs, states
    b, heads, e = v.sizes
    q, k = (of_heads(x, heads) for x in (q, k))
    added = hlo.reshape(v * hlo.reshape(beta, b, heads, 1), b, heads, 1, e)
    new = memory * hlo.reshape(hlo.exp(decay), b, heads, 1, 1) + k * added
    return hlo.sum(new * q, 2), [new]
