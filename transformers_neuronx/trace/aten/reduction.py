"""Operations along axes: sums, extremes, sorting, cumulative sums, and normalizations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from transformers_neuronx import hlo
from transformers_neuronx.layers.norm import layer_norm as layer_norm_layer
from transformers_neuronx.pyhlo import Shape, Tensor
from transformers_neuronx.pyhlo.dtypes import limits, to_torch
from transformers_neuronx.trace.aten.table import Results, axes_of, converted, is_float, lowers, of_training, widened

aten = torch.ops.aten

Dims = int | Sequence[int] | None


# Sums and extremes.


@lowers(aten.sum.dim_IntList)
def sum(out: Shape, x: Tensor, dim: Dims = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    x = widened(converted(x, out.dtype))
    return hlo.convert(hlo.sum(x, axes_of(x, dim), keepdim), out.dtype)


@lowers(aten.mean.default, aten.mean.dim)
def mean(out: Shape, x: Tensor, dim: Dims = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    x = widened(converted(x, out.dtype))
    return hlo.convert(hlo.mean(x, axes_of(x, dim), keepdim), out.dtype)


@lowers(aten.prod.default)
def prod(out: Shape, x: Tensor, dtype: Any = None) -> Tensor:
    return prod_dim(out, x, None)


@lowers(aten.prod.dim_int)
def prod_dim(out: Shape, x: Tensor, dim: Dims, keepdim: bool = False, dtype: Any = None) -> Tensor:
    x = widened(converted(x, out.dtype))
    return hlo.convert(hlo.reduce(x, "Multiply", 1, axes_of(x, dim), keepdim), out.dtype)


@lowers(aten.amax.default, aten.max.default)
def amax(out: Shape, x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    return hlo.max(x, axes_of(x, dim), keepdim)


@lowers(aten.amin.default, aten.min.default)
def amin(out: Shape, x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    return hlo.min(x, axes_of(x, dim), keepdim)


@lowers(aten.any.default, aten.any.dim, aten.any.dims)
def any(out: Shape, x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    return converted(hlo.any(converted(x, "pred"), axes_of(x, dim), keepdim), out.dtype)


def _first_largest(x: Tensor, axis: int) -> Tensor:
    return hlo.convert(hlo.argmax(x, axis), "s64") if x.sizes else hlo.constant(0, "s64")


def _reversed(x: Tensor) -> Tensor:
    """Return values in the opposite order: the smallest is the largest."""
    return -x if is_float(x.dtype) else ~x


@lowers(aten.argmax.default)
def argmax(out: Shape, x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    x = hlo.convert(x, "s32") if x.dtype.name == "pred" else x
    places = _first_largest(hlo.reshape(x, -1) if dim is None else x, 0 if dim is None else dim)
    return hlo.reshape(places, *out.sizes)


@lowers(aten.argmin.default)
def argmin(out: Shape, x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    return argmax(out, _reversed(x), dim, keepdim)


@lowers(aten.max.dim)
def max_dim(out: Results, x: Tensor, dim: int, keepdim: bool = False) -> list[Tensor | None]:
    assert out[0]
    return [amax(out[0], x, dim, keepdim), argmax(out[1], x, dim, keepdim) if out[1] else None]


@lowers(aten.min.dim)
def min_dim(out: Results, x: Tensor, dim: int, keepdim: bool = False) -> list[Tensor | None]:
    assert out[0]
    return [amin(out[0], x, dim, keepdim), argmin(out[1], x, dim, keepdim) if out[1] else None]


@lowers(aten.var.correction)
def var(out: Shape, x: Tensor, dim: Dims = None, correction: float | None = None, keepdim: bool = False) -> Tensor:
    axes, wide = axes_of(x, dim), widened(x)
    offset = wide - hlo.mean(wide, axes, keep=True)
    freedom = max(math.prod(x.sizes[axis] for axis in axes) - (1 if correction is None else correction), 0)
    return hlo.convert(hlo.sum(offset * offset, axes, keepdim) / float(freedom), out.dtype)


@lowers(aten.var_mean.correction)
def var_mean(
    out: Results, x: Tensor, dim: Dims = None, correction: float | None = None, keepdim: bool = False
) -> list[Tensor | None]:
    assert out[0]
    return [var(out[0], x, dim, correction, keepdim), mean(out[1], x, dim, keepdim) if out[1] else None]


# Sorting.


@lowers(aten.sort.default, aten.sort.stable)
def sort(
    out: Sequence[Shape], x: Tensor, dim: int = -1, descending: bool = False, stable: bool | None = None
) -> list[Tensor]:
    if not x.sizes:
        return [x, hlo.constant(0, "s64")]
    values, places = hlo.sort(x, dim, descending)
    return [values, hlo.convert(places, "s64")]


@lowers(aten.topk.default)
def topk(
    out: Sequence[Shape], x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> list[Tensor]:
    values, places = sort(out, x, dim, largest)
    return [hlo.slice(each, dim, 0, k) for each in (values, places)]


# Cumulative sums, by doubling: after step s, each element covers the last 2**s elements.


def _running(x: Tensor, dim: int, combine: Callable[[Tensor, Tensor], Tensor], neutral: float) -> Tensor:
    if not x.sizes:
        return x
    size, shift = x.sizes[dim], 1
    while shift < size:
        x = combine(x, hlo.pad(hlo.slice(x, dim, 0, size - shift), dim, shift, 0, neutral))
        shift *= 2
    return x


@lowers(aten.cumsum.default)
def cumsum(out: Shape, x: Tensor, dim: int, dtype: Any = None) -> Tensor:
    return hlo.convert(_running(widened(converted(x, out.dtype)), dim, hlo.add, 0), out.dtype)


@lowers(aten.cumprod.default)
def cumprod(out: Shape, x: Tensor, dim: int, dtype: Any = None) -> Tensor:
    return hlo.convert(_running(widened(converted(x, out.dtype)), dim, hlo.multiply, 1), out.dtype)


@lowers(aten.cummax.default)
def cummax(out: Sequence[Shape], x: Tensor, dim: int) -> list[Tensor]:
    values = _running(x, dim, hlo.maximum, limits(x.dtype.name)[0])
    own = hlo.equal(x, values) if x.sizes else hlo.full(True, "pred", ())  # the last of equal values counts
    places = hlo.select(own, hlo.iota("s64", x.sizes, dim % len(x.sizes)) if x.sizes else hlo.constant(0, "s64"), -1)
    return [values, _running(places, dim, hlo.maximum, -1)]


# Normalizations.


@lowers(aten._softmax.default, aten.softmax.int)
def softmax(out: Shape, x: Tensor, dim: int, dtype: Any = None) -> Tensor:
    x = widened(hlo.convert(x, out.dtype))
    e = hlo.exp(x - hlo.max(x, axes_of(x, dim), keep=True))
    return hlo.convert(e / hlo.sum(e, axes_of(x, dim), keep=True), out.dtype)


@lowers(aten._log_softmax.default, aten.log_softmax.int)
def log_softmax(out: Shape, x: Tensor, dim: int, dtype: Any = None) -> Tensor:
    x = widened(hlo.convert(x, out.dtype))
    x = x - hlo.max(x, axes_of(x, dim), keep=True)
    return hlo.convert(x - hlo.log(hlo.sum(hlo.exp(x), axes_of(x, dim), keep=True)), out.dtype)


@lowers(aten.layer_norm.default)
def layer_norm(
    out: Shape,
    x: Tensor,
    normalized: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    size = math.prod(normalized)
    rows = hlo.reshape(x, *x.sizes[: len(x.sizes) - len(normalized)], size)
    if x.dtype.name == "f64":
        return _normalized(out, rows, [len(rows.sizes) - 1], weight, bias, eps)
    parts = [
        SimpleNamespace(
            tensor=hlo.full(default, "f32", [size]) if x is None else hlo.convert(hlo.reshape(x, -1), "f32")
        )
        for x, default in ((weight, 1.0), (bias, 0.0))
    ]
    w = SimpleNamespace(weight=parts[0], bias=parts[1])
    return hlo.reshape(layer_norm_layer(rows, w, eps), *out.sizes)


@lowers(aten.native_layer_norm.default)
def native_layer_norm(
    out: Sequence[Shape], x: Tensor, normalized: Sequence[int], weight: Any, bias: Any, eps: float
) -> list[Tensor | None]:
    return [layer_norm(out[0], x, normalized, weight, bias, eps), None, None]


@lowers(aten.rms_norm.default)
def rms_norm(
    out: Shape, x: Tensor, normalized: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    wide = widened(x)
    axes = list(range(len(x.sizes) - len(normalized), len(x.sizes)))
    eps = torch.finfo(to_torch(x.dtype.name)).eps if eps is None else eps
    y = wide * hlo.rsqrt(hlo.mean(wide * wide, axes, keep=True) + eps)
    return hlo.convert(y if weight is None else y * hlo.convert(weight, y.dtype), out.dtype)


def _normalized(
    out: Shape, x: Tensor, axes: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Normalize to mean 0 and variance 1 over the axes, then apply a weight and a bias that broadcast."""
    wide = widened(x)
    offset = wide - hlo.mean(wide, axes, keep=True)
    y = offset * hlo.rsqrt(hlo.mean(offset * offset, axes, keep=True) + eps)
    y = hlo.reshape(y, *out.sizes)
    y = y if weight is None else y * hlo.convert(weight, y.dtype)
    return hlo.convert(y if bias is None else y + hlo.convert(bias, y.dtype), out.dtype)


def _per_channel(x: Tensor | None, rank: int) -> Tensor | None:
    return None if x is None else hlo.reshape(x, *x.sizes, *[1] * (rank - 2))


@lowers(aten.group_norm.default)
def group_norm(
    out: Shape,
    x: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    weight, bias = (_per_channel(each, len(x.sizes)) for each in (weight, bias))
    return _normalized(out, hlo.reshape(x, x.sizes[0], groups, -1), [2], weight, bias, eps)


@lowers(aten.native_group_norm.default)
def native_group_norm(
    out: Sequence[Shape], x: Tensor, weight: Any, bias: Any, n: int, c: int, hxw: int, groups: int, eps: float
) -> list[Tensor | None]:
    return [group_norm(out[0], x, groups, weight, bias, eps), None, None]


@lowers(aten._native_batch_norm_legit_no_training.default)
def batch_norm(
    out: Sequence[Shape],
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    momentum: float,
    eps: float,
) -> list[Tensor | None]:
    scale = hlo.rsqrt(widened(variance) + eps)
    scale = scale if weight is None else scale * hlo.convert(weight, scale.dtype)
    offset = -widened(mean) * scale
    offset = offset if bias is None else offset + hlo.convert(bias, scale.dtype)
    scale, offset = (hlo.reshape(each, *each.sizes, *[1] * (len(x.sizes) - 2)) for each in (scale, offset))
    return [hlo.convert(widened(x) * scale + offset, out[0].dtype), None, None]


@lowers(aten._native_batch_norm_legit.no_stats)
def instance_norm(
    out: Sequence[Shape], x: Tensor, weight: Any, bias: Any, training: bool, momentum: float, eps: float
) -> list[Tensor | None]:
    weight, bias = (_per_channel(each, len(x.sizes)) for each in (weight, bias))
    axes = [axis for axis in range(len(x.sizes)) if axis != 1]
    return [_normalized(out[0], x, axes, weight, bias, eps), None, None]


@lowers(aten.native_dropout.default)
def dropout(out: Sequence[Shape], x: Tensor, p: float, train: bool | None) -> list[Tensor]:
    raise of_training("dropout")
