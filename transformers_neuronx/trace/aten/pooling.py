"""Average and max pooling."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from transformers_neuronx import hlo
from transformers_neuronx.pyhlo import Shape, Tensor
from transformers_neuronx.pyhlo.dtypes import limits
from transformers_neuronx.trace.aten.table import Results, is_float, lowers, widened

aten = torch.ops.aten


def _each(value: int | Sequence[int], rank: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * rank if len(values) == 1 else values


def _edges(sizes: Sequence[int], out: Sequence[int], kernel: Sequence[int], stride: Sequence[int],
           padding: Sequence[int], dilation: Sequence[int]) -> list[tuple[int, int]]:  # fmt: skip
    """Return each axis's padding. At the end it fits the output's windows, which need more with `ceil_mode`."""
    facts = zip(sizes, out, kernel, stride, padding, dilation, strict=True)
    return [(low, max((count - 1) * s + (k - 1) * d + 1 - size - low, 0)) for size, count, k, s, low, d in facts]


@lowers(aten.max_pool2d_with_indices.default)
def max_pool2d(
    out: Results,
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> list[Tensor | None]:
    return _max_pool(out, x, 2, kernel_size, stride, padding, dilation)


@lowers(aten.max_pool3d_with_indices.default)
def max_pool3d(
    out: Results,
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> list[Tensor | None]:
    return _max_pool(out, x, 3, kernel_size, stride, padding, dilation)


def _max_pool(
    out: Results, x: Tensor, rank: int, kernel: Sequence[int], stride: Sequence[int], padding: Any, dilation: Any
) -> list[Tensor | None]:
    """Return the largest values, and the flat index of each within the pooled axes."""
    assert out[0]
    kernel, padding, dilation = (_each(each, rank) for each in (kernel, padding, dilation))
    stride = _each(stride or kernel, rank)
    edges = _edges(x.sizes[-rank:], out[0].sizes[-rank:], kernel, stride, padding, dilation)
    values = hlo.reduce_window(x, "Maximum", limits(x.dtype.name)[0], kernel, stride, edges, dilation)
    return [values, _places_of_largest(out[1], x, kernel, stride, edges, dilation) if out[1] else None]


def _places_of_largest(out: Shape, x: Tensor, kernel: Sequence[int], stride: Sequence[int],
                       edges: Sequence[tuple[int, int]], dilation: Sequence[int]) -> Tensor:  # fmt: skip
    """Return each window's argmax, one window offset at a time: the first of equal values, the last NaN, no padding."""
    first = len(x.sizes) - len(kernel)
    sizes = x.sizes[first:]
    numbers = hlo.broadcast_to(hlo.reshape(hlo.iota("s64", [math.prod(sizes)]), *sizes), x.sizes)
    for axis, (low, high) in enumerate(edges, first):
        x, numbers = hlo.pad(x, axis, low, high), hlo.pad(numbers, axis, low, high, -1)
    best, place = hlo.full(limits(x.dtype.name)[0], x.dtype, out.sizes), hlo.full(-1, "s64", out.sizes)
    for offsets in itertools.product(*(range(0, k * d, d) for k, d in zip(kernel, dilation, strict=True))):
        value, number = x, numbers
        for axis, (start, step) in enumerate(zip(offsets, stride, strict=True), first):
            end = start + (out.sizes[axis] - 1) * step + 1
            value, number = (hlo.slice(each, axis, start, end, step) for each in (value, number))
        better = hlo.logical_or(value > best, place < 0)
        if is_float(x.dtype):
            better = hlo.logical_or(better, hlo.not_equal(value, value))
        better = hlo.logical_and(better, number >= 0)
        best, place = hlo.select(better, value, best), hlo.select(better, number, place)
    return place


@lowers(aten.avg_pool2d.default, aten.avg_pool3d.default)
def avg_pool(
    out: Shape,
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    rank = len(kernel_size)
    kernel, padding = _each(kernel_size, rank), _each(padding, rank)
    stride, ones = _each(stride or kernel, rank), [1] * rank
    edges = _edges(x.sizes[-rank:], out.sizes[-rank:], kernel, stride, padding, ones)
    total = hlo.reduce_window(widened(x), "Add", 0, kernel, stride, edges, ones)
    if divisor_override is not None:
        return hlo.convert(total / float(divisor_override), out.dtype)
    counted = hlo.full(1.0, total.dtype, x.sizes[-rank:])
    if count_include_pad:  # the padding that `ceil_mode` adds is not counted
        for axis, low in enumerate(padding):
            counted = hlo.pad(counted, axis, low, low, 1.0)
        edges = [(0, max(high - low, 0)) for (_, high), low in zip(edges, padding, strict=True)]
    count = hlo.reduce_window(counted, "Add", 0, kernel, stride, edges, ones)
    return hlo.convert(total / count, out.dtype)


@lowers(aten.adaptive_avg_pool1d.default, aten.adaptive_avg_pool2d.default, aten.adaptive_avg_pool3d.default)
def adaptive_avg_pool(out: Shape, x: Tensor, output_size: Sequence[int]) -> Tensor:
    rank = len(output_size)
    y = widened(x)
    for axis in range(len(x.sizes) - rank, len(x.sizes)):
        size, count = x.sizes[axis], out.sizes[axis]
        bounds = [(i * size // count, math.ceil((i + 1) * size / count)) for i in range(count)]
        parts = [hlo.mean(hlo.slice(y, axis, low, high), axis, keep=True) for low, high in bounds]
        y = hlo.concatenate(parts, axis)
    return hlo.convert(y, out.dtype)
