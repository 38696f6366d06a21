"""Operations that make tensors or move their elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from transformers_neuronx import hlo
from transformers_neuronx.pyhlo import Shape, Tensor
from transformers_neuronx.pyhlo.dtypes import to_torch
from transformers_neuronx.trace.aten.table import axes_of, converted, is_float, lowers, promoted

aten = torch.ops.aten

END = 2**63 - 1  # the end of an exported slice that has no end


# Creation.


@lowers(aten.full.default, aten.full_like.default)
def full(out: Shape, like: Any, value: Any, dtype: Any = None) -> Tensor:
    if isinstance(value, Tensor):
        return hlo.broadcast_to(converted(value, out.dtype), out.sizes)
    return hlo.full(_held(value, out), out.dtype, out.sizes)


@lowers(aten.scalar_tensor.default)
def scalar_tensor(out: Shape, value: float, dtype: Any = None) -> Tensor:
    return hlo.full(_held(value, out), out.dtype, ())


def _held(value: float, out: Shape) -> float:
    """Clamp a finite number to the element type's range, so that a large one stays finite in a narrower type."""
    if not is_float(out.dtype) or not math.isfinite(value):
        return value
    limit = torch.finfo(to_torch(out.dtype.name)).max
    return max(-limit, min(limit, value))


@lowers(aten.empty.memory_format)
def empty(out: Shape, sizes: Any, dtype: Any = None) -> Tensor:
    return hlo.full(0, out.dtype, out.sizes)


@lowers(aten.arange.start_step)
def arange(out: Shape, start: float, end: float, step: float = 1, dtype: Any = None) -> Tensor:
    counted = hlo.iota(out.dtype, out.sizes)
    return counted * step + start if step != 1 else counted + start if start else counted


# Views.


def _as_it_is(out: Shape, x: Tensor) -> Tensor:
    return x


def _reshaped(out: Shape, x: Tensor, *_: Any) -> Tensor:
    return hlo.reshape(x, *out.sizes)


lowers(aten.alias.default, aten.clone.default)(_as_it_is)
lowers(aten.view.default, aten.unsqueeze.default, aten.squeeze.dims)(_reshaped)


@lowers(aten.view.dtype)
def view_dtype(out: Shape, x: Tensor, dtype: Any) -> Tensor:
    return hlo.bitcast_convert(x, out.dtype)


@lowers(aten.expand.default)
def expand(out: Shape, x: Tensor, sizes: Sequence[int], implicit: bool = False) -> Tensor:
    return hlo.broadcast_to(x, out.sizes)


@lowers(aten.permute.default)
def permute(out: Shape, x: Tensor, dims: Sequence[int]) -> Tensor:
    return hlo.transpose(x, *axes_of(x, dims))


@lowers(aten.slice.Tensor)
def slice(
    out: Shape, x: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    return hlo.slice(x, dim, *_bounds(x, dim, start, end), step)


def _bounds(x: Tensor, dim: int, start: int | None, end: int | None) -> tuple[int, int]:
    """Return a slice's bounds as indices from the start, within the axis."""
    size = x.sizes[dim]
    first, last = (
        min(max(bound + size if bound < 0 else bound, 0), size)
        for bound in (start or 0, END if end is None else end)
    )  # fmt: skip
    return first, max(first, last)


@lowers(aten.select.int)
def select(out: Shape, x: Tensor, dim: int, index: int) -> Tensor:
    index %= x.sizes[dim]
    return hlo.reshape(hlo.slice(x, dim, index, index + 1), *out.sizes)


@lowers(aten.diagonal.default)
def diagonal(out: Shape, x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    axes = axes_of(x, (dim1, dim2))
    counted = hlo.iota("s32", out.sizes[-1:])
    places = [counted + max(-offset, 0), counted + max(offset, 0)]
    found = hlo.gather_rows(x, hlo.concatenate([hlo.reshape(place, -1, 1) for place in places], 1), tuple(axes))
    return hlo.transpose(found, *range(1, len(out.sizes)), 0)


# Splitting and concatenation.


@lowers(aten.cat.default)
def cat(out: Shape, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    # PyTorch accepts an empty tensor of one axis next to any other, and ignores it.
    real = [x for x in promoted(out.dtype, *tensors) if x.sizes != (0,) or out.sizes == (0,)]
    return hlo.concatenate(real, dim)


@lowers(aten.split_with_sizes.default)
def split_with_sizes(out: Sequence[Shape], x: Tensor, sizes: Sequence[int], dim: int = 0) -> list[Tensor]:
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    return [hlo.slice(x, dim, start, start + size) for start, size in zip(starts, sizes, strict=True)]


@lowers(aten.repeat.default)
def repeat(out: Shape, x: Tensor, repeats: Sequence[int]) -> Tensor:
    sizes = (1,) * (len(repeats) - len(x.sizes)) + x.sizes
    both = [size for pair in zip(repeats, sizes, strict=True) for size in pair]
    ones = [size for pair in ((1, size) for size in sizes) for size in pair]
    return hlo.reshape(hlo.broadcast_to(hlo.reshape(x, *ones), both), *out.sizes)


@lowers(aten.flip.default)
def flip(out: Shape, x: Tensor, dims: Sequence[int]) -> Tensor:
    return hlo.reverse(x, *dims)


@lowers(aten.roll.default)
def roll(out: Shape, x: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Tensor:
    flat = hlo.reshape(x, -1) if not dims else x
    for shift, dim in zip(shifts, dims or [0], strict=True):
        size = flat.sizes[dim]
        cut = size - shift % size if size else 0
        flat = hlo.concatenate([hlo.slice(flat, dim, cut, size), hlo.slice(flat, dim, 0, cut)], dim)
    return hlo.reshape(flat, *out.sizes)


@lowers(aten.constant_pad_nd.default)
def constant_pad(out: Shape, x: Tensor, padding: Sequence[int], value: float = 0) -> Tensor:
    """Pad with a constant. `padding` has a pair for each axis, last axis first."""
    for number in range(0, len(padding), 2):
        axis, (low, high) = len(x.sizes) - 1 - number // 2, padding[number : number + 2]
        size = x.sizes[axis]
        x = hlo.slice(x, axis, max(-low, 0), size - max(-high, 0))
        x = hlo.pad(x, axis, max(low, 0), max(high, 0), _held(value, out))
    return x


# Writing to a slice.


@lowers(aten.copy.default)
def copy(out: Shape, x: Tensor, source: Tensor) -> Tensor:
    return hlo.broadcast_to(converted(source, out.dtype), out.sizes)


@lowers(aten.slice_scatter.default)
def slice_scatter(
    out: Shape,
    x: Tensor,
    source: Tensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Tensor:
    first, last = _bounds(x, dim, start, end)
    if step == 1:
        sizes = [last - first if axis == dim % len(x.sizes) else size for axis, size in enumerate(x.sizes)]
        starts = [first if axis == dim % len(x.sizes) else 0 for axis in range(len(x.sizes))]
        return hlo.dynamic_update_slice(x, hlo.broadcast_to(converted(source, x.dtype), sizes), starts)
    places = hlo.iota("s32", [len(range(first, last, step)), 1]) * step + first
    rows = hlo.transpose(source, dim % len(x.sizes), *(i for i in range(len(x.sizes)) if i != dim % len(x.sizes)))
    return hlo.scatter_rows(x, places, converted(rows, x.dtype), (dim % len(x.sizes),))
