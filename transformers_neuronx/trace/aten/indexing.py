"""Operations that read or write elements by index.

A negative index counts from the end. PyTorch raises an error for an index out of range, but a program cannot: reads
take the nearest element, and writes are dropped. `trace/ranges.py` raises the error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from transformers_neuronx import hlo
from transformers_neuronx.errors import GraphError
from transformers_neuronx.layers import lookup
from transformers_neuronx.pyhlo import Shape, Tensor
from transformers_neuronx.trace.aten.table import converted, lowers
from transformers_neuronx.weights.parameters import Parameter

aten = torch.ops.aten


def _from_the_front(indices: Tensor, size: int) -> Tensor:
    return hlo.select(indices < 0, indices + size, indices)


@lowers(aten.embedding.default)
def embedding(out: Shape, table: Tensor | Parameter, ids: Tensor, *_: Any, **__: Any) -> Tensor:
    return hlo.convert(lookup(table, ids), out.dtype) if isinstance(table, Parameter) else hlo.take(table, ids)


@lowers(aten.index_select.default)
def index_select(out: Shape, x: Tensor, dim: int, index: Tensor) -> Tensor:
    return hlo.take(x, hlo.reshape(index, -1), dim) if x.sizes else x


@lowers(aten.index.Tensor)
def index(out: Shape, x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    axes, places = _places(x, indices)
    if len(axes) == 1:
        return hlo.take(x, hlo.reshape(places, *places.sizes[:-1]), axes[0])
    found = hlo.gather_rows(x, places, axes)
    # PyTorch puts the index axes first, or in place of the indexed axes if these are adjacent.
    lead = len(places.sizes) - 1
    if axes != tuple(range(axes[0], axes[0] + len(axes))):
        return found
    before = range(lead, lead + axes[0])
    return hlo.transpose(found, *before, *range(lead), *range(before.stop, len(found.sizes)))


@lowers(aten.index_put.default)
def index_put(
    out: Shape, x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False
) -> Tensor:
    values = converted(values, x.dtype)
    masks = [each for each in indices if each is not None and each.dtype.name == "pred"]
    if len(masks) == len(indices) == 1 and values.sizes in ((), (1,)) and not accumulate:
        sizes = masks[0].sizes + (1,) * (len(x.sizes) - len(masks[0].sizes))
        return hlo.select(hlo.reshape(masks[0], *sizes), hlo.reshape(values), x)
    axes, places = _places(x, indices)
    rest = [size for axis, size in enumerate(x.sizes) if axis not in axes]
    neighbours = axes == tuple(range(axes[0], axes[0] + len(axes)))
    lead, first = places.sizes[:-1], axes[0] if neighbours else 0
    values = hlo.broadcast_to(values, [*rest[:first], *lead, *rest[first:]])
    at = range(first, first + len(lead))
    values = hlo.transpose(values, *at, *(axis for axis in range(len(values.sizes)) if axis not in at))
    return hlo.scatter_rows(x, places, values, axes, "Add" if accumulate else None)


def _places(x: Tensor, indices: Sequence[Tensor | None]) -> tuple[tuple[int, ...], Tensor]:
    """Return the axes that have an index, and their indices stacked, `s64[..., axes]`."""
    given = [(axis, each) for axis, each in enumerate(indices) if each is not None]
    if any(each.dtype.name == "pred" for _, each in given):
        raise GraphError(
            f"indexing {x!r} with a mask gives a size that depends on the mask, but programs have fixed shapes: "
            "use torch.where"
        )
    sizes = np.broadcast_shapes(*(each.sizes for _, each in given))
    places = [
        hlo.reshape(hlo.broadcast_to(_from_the_front(hlo.convert(each, "s64"), x.sizes[axis]), sizes), *sizes, 1)
        for axis, each in given
    ]
    return tuple(axis for axis, _ in given), hlo.concatenate(places, -1)


def _along(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """Return the full index in `x` of each element of `index` along an axis, `s64[*index, axes]`."""
    dim %= len(x.sizes)
    places = [
        _from_the_front(hlo.convert(index, "s64"), x.sizes[dim]) if axis == dim else hlo.iota("s64", index.sizes, axis)
        for axis in range(len(x.sizes))
    ]
    return hlo.concatenate([hlo.reshape(place, *index.sizes, 1) for place in places], -1)


@lowers(aten.gather.default)
def gather(out: Shape, x: Tensor, dim: int, index: Tensor, sparse_grad: bool = False) -> Tensor:
    if not x.sizes:
        return hlo.broadcast_to(x, index.sizes)
    return hlo.gather_rows(x, _along(x, dim, index), tuple(range(len(x.sizes))))


@lowers(aten.index_add.default)
def index_add(out: Shape, x: Tensor, dim: int, index: Tensor, source: Tensor, alpha: float = 1) -> Tensor:
    return _written(x, dim, index, source * alpha if alpha != 1 else source, "Add")


@lowers(aten.index_copy.default)
def index_copy(out: Shape, x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    return _written(x, dim, index, source, None)


@lowers(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
def index_fill(out: Shape, x: Tensor, dim: int, index: Tensor, value: Tensor | float) -> Tensor:
    size = x.sizes[dim] if x.sizes else 1
    sizes = [math.prod(index.sizes) if axis == dim % len(x.sizes) else each for axis, each in enumerate(x.sizes)]
    source = hlo.broadcast_to(value, sizes) if isinstance(value, Tensor) else hlo.full(value, x.dtype, sizes)
    return _written(x, dim, _from_the_front(index, size), source, None)


def _written(x: Tensor, dim: int, index: Tensor, source: Tensor, op: str | None) -> Tensor:
    """Write `source` into `x` at the positions `index` of an axis."""
    sizes = x.sizes
    if not sizes:
        x, source = hlo.reshape(x, 1), hlo.reshape(source, 1)
    dim %= len(x.sizes)
    rows = hlo.transpose(converted(source, x.dtype), dim, *(axis for axis in range(len(x.sizes)) if axis != dim))
    return hlo.reshape(hlo.scatter_rows(x, hlo.reshape(index, -1, 1), rows, (dim,), op), *sizes)


REDUCTIONS = dict(sum="Add", prod="Multiply", amax="Maximum", amin="Minimum")


def _scattered(x: Tensor, dim: int, index: Tensor, source: Tensor | float, op: str | None) -> Tensor:
    if isinstance(source, Tensor):
        for axis, size in enumerate(index.sizes):
            source = hlo.slice(source, axis, 0, size)
        updates = converted(source, x.dtype)
    else:
        updates = hlo.full(source, x.dtype, index.sizes)
    return hlo.scatter_rows(x, _along(x, dim, index), updates, tuple(range(len(x.sizes))), op)


@lowers(aten.scatter.src, aten.scatter.value)
def scatter(out: Shape, x: Tensor, dim: int, index: Tensor, source: Tensor | float) -> Tensor:
    return _scattered(x, dim, index, source, None)


@lowers(aten.scatter_add.default)
def scatter_add(out: Shape, x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    return _scattered(x, dim, index, source, "Add")


@lowers(aten.scatter_reduce.two)
def scatter_reduce(
    out: Shape, x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, include_self: bool = True
) -> Tensor:
    if reduce not in REDUCTIONS or not include_self:
        raise GraphError(
            f"scatter_reduce must be one of {', '.join(REDUCTIONS)} with include_self=True, got {reduce!r} with "
            f"include_self={include_self}"
        )
    return _scattered(x, dim, index, source, REDUCTIONS[reduce])
