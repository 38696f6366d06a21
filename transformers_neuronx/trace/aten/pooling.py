"""Averages and extremes over windows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from transformers_neuronx import hlo
from transformers_neuronx.pyhlo import Shape, Tensor
from transformers_neuronx.pyhlo.dtypes import limits
from transformers_neuronx.trace.aten.table import lowers, widened

aten = torch.ops.aten


def _each(value: int | Sequence[int], rank: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * rank if len(values) == 1 else values


def _edges(sizes: Sequence[int], out: Sequence[int], kernel: Sequence[int], stride: Sequence[int],
           padding: Sequence[int], dilation: Sequence[int]) -> list[tuple[int, int]]:  # fmt: skip
    """Padding of each axis, at its end as much as the windows that come out need: with `ceil_mode` that is more."""
    facts = zip(sizes, out, kernel, stride, padding, dilation, strict=True)
    return [(low, max((count - 1) * s + (k - 1) * d + 1 - size - low, 0)) for size, count, k, s, low, d in facts]


@lowers(aten.max_pool2d_with_indices.default)
def max_pool2d(
    out: Sequence[Shape],
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> list[Tensor | None]:
    """The values. Where they were is not worked out: a use of that is refused as one of nothing."""
    kernel, padding, dilation = (_each(each, 2) for each in (kernel_size, padding, dilation))
    stride = _each(stride or kernel, 2)
    edges = _edges(x.sizes[-2:], out[0].sizes[-2:], kernel, stride, padding, dilation)
    lowest = limits(x.dtype.name)[0]
    return [hlo.reduce_window(x, "Maximum", lowest, kernel, stride, edges, dilation), None]


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
    if count_include_pad:  # but not what `ceil_mode` adds beyond that
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
