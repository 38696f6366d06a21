"""Elementwise operations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from transformers_neuronx import hlo
from transformers_neuronx.layers.activation import gelu, gelu_tanh, silu
from transformers_neuronx.pyhlo import Shape, Tensor
from transformers_neuronx.trace.aten.table import (
    TABLE,
    common_type,
    converted,
    is_float,
    lowers,
    promoted,
    widened,
)

aten = torch.ops.aten


# Unary operations.


def _of_one(function: Callable[[Tensor], Tensor]) -> Callable[[Shape, Tensor], Tensor]:
    """Lower a unary function: compute in the result type, but at least in f32."""

    def lower(out: Shape, x: Tensor) -> Tensor:
        return hlo.convert(function(widened(hlo.convert(x, out.dtype))), out.dtype)

    return lower


def _sinh(x: Tensor) -> Tensor:
    return (hlo.exp(x) - hlo.exp(-x)) * 0.5


def _cosh(x: Tensor) -> Tensor:
    return (hlo.exp(x) + hlo.exp(-x)) * 0.5


def _asinh(x: Tensor) -> Tensor:
    size = hlo.abs(x)
    return hlo.sign(x) * hlo.log1p(size + size * size / (hlo.sqrt(size * size + 1.0) + 1.0))


def _atanh(x: Tensor) -> Tensor:
    return (hlo.log1p(x) - hlo.log1p(-x)) * 0.5


TABLE |= {
    operation: _of_one(function)
    for operation, function in {
        aten.acos.default: lambda x: hlo.atan2(hlo.sqrt((1.0 - x) * (1.0 + x)), x),
        aten.acosh.default: lambda x: hlo.log(x + hlo.sqrt(x - 1.0) * hlo.sqrt(x + 1.0)),
        aten.asin.default: lambda x: hlo.atan2(x, hlo.sqrt((1.0 - x) * (1.0 + x))),
        aten.asinh.default: _asinh,
        aten.atan.default: lambda x: hlo.atan2(x, 1.0),
        aten.atanh.default: _atanh,
        aten.cos.default: hlo.cos,
        aten.cosh.default: _cosh,
        aten.erf.default: hlo.erf,
        aten.exp.default: hlo.exp,
        aten.exp2.default: lambda x: hlo.exp(x * math.log(2)),
        aten.expm1.default: hlo.expm1,
        aten.log.default: hlo.log,
        aten.log10.default: lambda x: hlo.log(x) * (1 / math.log(10)),
        aten.log1p.default: hlo.log1p,
        aten.log2.default: lambda x: hlo.log(x) * (1 / math.log(2)),
        aten.reciprocal.default: lambda x: 1.0 / x,
        aten.rsqrt.default: hlo.rsqrt,
        aten.sigmoid.default: hlo.logistic,
        aten.silu.default: silu,
        aten.sin.default: hlo.sin,
        aten.sinh.default: _sinh,
        aten.sqrt.default: hlo.sqrt,
        aten.tan.default: hlo.tan,
        aten.tanh.default: hlo.tanh,
    }.items()
}


def _or_as_it_is(function: Callable[[Tensor], Tensor]) -> Callable[[Shape, Tensor], Tensor]:
    """Lower a unary function that leaves integers unchanged."""
    return lambda out, x: function(x) if is_float(x.dtype) else x


def _sign(out: Shape, x: Tensor) -> Tensor:
    """Return the sign of `x`. The sign of a NaN is 0."""
    if is_float(x.dtype):
        return hlo.select(hlo.equal(x, x), hlo.sign(x), 0.0)
    return x if x.dtype.name == "pred" else hlo.sign(x)


TABLE |= {
    aten.ceil.default: _or_as_it_is(hlo.ceil),
    aten.floor.default: _or_as_it_is(hlo.floor),
    aten.round.default: _or_as_it_is(hlo.round),
    aten.trunc.default: _or_as_it_is(lambda x: hlo.select(x < 0.0, hlo.ceil(x), hlo.floor(x))),
    aten.abs.default: lambda out, x: x if x.dtype.name[0] in "pu" else hlo.abs(x),
    aten.neg.default: lambda out, x: -x,
    aten.sign.default: _sign,
    aten.relu.default: lambda out, x: hlo.maximum(x, 0),
    aten.bitwise_not.default: lambda out, x: ~x,
    aten.logical_not.default: lambda out, x: ~converted(x, "pred"),
    aten.isnan.default: lambda out, x: hlo.not_equal(x, x),
}


@lowers(aten.isinf.default)
def isinf(out: Shape, x: Tensor) -> Tensor:
    return hlo.equal(hlo.abs(x), math.inf) if is_float(x.dtype) else hlo.full(False, "pred", out.sizes)


@lowers(aten.gelu.default)
def gelu_of(out: Shape, x: Tensor, approximate: str = "none") -> Tensor:
    return hlo.convert((gelu if approximate == "none" else gelu_tanh)(widened(x)), out.dtype)


@lowers(aten.elu.default)
def elu(out: Shape, x: Tensor, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Tensor:
    x = widened(x)
    below = hlo.expm1(hlo.minimum(x, 0.0) * input_scale) * (alpha * scale)
    return hlo.convert(hlo.select(x > 0.0, x * scale, below), out.dtype)


@lowers(aten.leaky_relu.default)
def leaky_relu(out: Shape, x: Tensor, negative_slope: float = 0.01) -> Tensor:
    return hlo.select(x > 0.0, x, x * negative_slope)


@lowers(aten.hardtanh.default)
def hardtanh(out: Shape, x: Tensor, min_val: float = -1, max_val: float = 1) -> Tensor:
    return hlo.minimum(hlo.maximum(x, min_val), max_val)


# Arithmetic.


@lowers(aten.add.Tensor, aten.add.Scalar)
def add(out: Shape, a: Any, b: Any, alpha: float = 1) -> Tensor:
    if out.dtype.name == "pred":
        return hlo.logical_or(a, b)
    a, b = promoted(out.dtype, a, b)
    return hlo.add(a, b if alpha == 1 else b * alpha)


@lowers(aten.sub.Tensor, aten.sub.Scalar)
def sub(out: Shape, a: Any, b: Any, alpha: float = 1) -> Tensor:
    a, b = promoted(out.dtype, a, b)
    return hlo.subtract(a, b if alpha == 1 else b * alpha)


@lowers(aten.mul.Tensor, aten.mul.Scalar)
def mul(out: Shape, a: Any, b: Any) -> Tensor:
    a, b = promoted(out.dtype, a, b)
    return hlo.logical_and(a, b) if out.dtype.name == "pred" else hlo.multiply(a, b)


@lowers(aten.div.Tensor, aten.div.Scalar, aten.div.Tensor_mode, aten.div.Scalar_mode)
def div(out: Shape, a: Any, b: Any, rounding_mode: str | None = None) -> Tensor:
    a, b = promoted(out.dtype, a, b)
    if rounding_mode == "floor":
        return _floor_divide(out, a, b)
    quotient = hlo.divide(a, b)  # integer division truncates
    return TABLE[aten.trunc.default](out, quotient) if rounding_mode == "trunc" else quotient


def _floor_divide(out: Shape, a: Any, b: Any) -> Tensor:
    left = hlo.remainder(a, b)
    one_less = _signs_differ(left, b)
    if not is_float(out.dtype):
        return hlo.divide(a, b) - hlo.convert(one_less, out.dtype)
    exact = hlo.divide(hlo.subtract(a, left), b) - hlo.convert(one_less, out.dtype)  # exact up to rounding
    return hlo.select(hlo.equal(hlo.broadcast_to(_full(b, left), out.sizes), 0), hlo.divide(a, b), hlo.round(exact))


@lowers(aten.remainder.Tensor, aten.remainder.Scalar)
def remainder(out: Shape, a: Any, b: Any) -> Tensor:
    """Return the remainder with the sign of `b`."""
    a, b = promoted(out.dtype, a, b)
    left = hlo.remainder(a, b)
    return hlo.select(_signs_differ(left, b), hlo.add(left, b), left)


@lowers(aten.fmod.Tensor, aten.fmod.Scalar)
def fmod(out: Shape, a: Any, b: Any) -> Tensor:
    return hlo.remainder(*promoted(out.dtype, a, b))


def _full(x: Any, like: Tensor) -> Tensor:
    return x if isinstance(x, Tensor) else hlo.full(x, like.dtype, like.sizes)


def _signs_differ(left: Tensor, b: Any) -> Tensor:
    """Return where a remainder is not zero and its sign differs from that of `b`."""
    b = hlo.broadcast_to(_full(b, left), left.sizes)
    return hlo.not_equal(left, 0) & hlo.not_equal(left < 0, b < 0)


@lowers(aten.pow.Tensor_Tensor, aten.pow.Tensor_Scalar, aten.pow.Scalar)
def pow(out: Shape, a: Any, b: Any) -> Tensor:
    a, b = promoted(out.dtype, a, b)
    a, b = (widened(x) if isinstance(x, Tensor) else x for x in (a, b))
    if isinstance(b, int | float) and b in (1, 2, 3, 4):
        power = a
        for _ in range(int(b) - 1):
            power = power * a
    elif isinstance(b, float) and b in (0.5, -0.5):
        power = hlo.sqrt(a) if b > 0 else hlo.rsqrt(a)
    else:
        power = hlo.power(a, b)
    return hlo.convert(power, out.dtype)


@lowers(aten.atan2.default)
def atan2(out: Shape, a: Tensor, b: Tensor) -> Tensor:
    return hlo.atan2(*promoted(out.dtype, a, b))


@lowers(aten.hypot.default)
def hypot(out: Shape, a: Tensor, b: Tensor) -> Tensor:
    a, b = (hlo.abs(widened(x)) for x in promoted(out.dtype, a, b))
    larger, smaller = hlo.maximum(a, b), hlo.minimum(a, b)
    ratio = smaller / hlo.select(larger > 0.0, larger, 1.0)
    return hlo.convert(larger * hlo.sqrt(ratio * ratio + 1.0), out.dtype)


@lowers(aten.maximum.default)
def maximum(out: Shape, a: Tensor, b: Tensor) -> Tensor:
    return hlo.maximum(*promoted(out.dtype, a, b))


@lowers(aten.minimum.default)
def minimum(out: Shape, a: Tensor, b: Tensor) -> Tensor:
    return hlo.minimum(*promoted(out.dtype, a, b))


@lowers(aten.clamp.default, aten.clamp.Tensor)
def clamp(out: Shape, x: Tensor, min: Any = None, max: Any = None) -> Tensor:
    (x,) = promoted(out.dtype, x)
    for bound, function in ((min, hlo.maximum), (max, hlo.minimum)):
        if bound is not None:
            x = function(x, *promoted(out.dtype, bound))
    return x


# Logic, comparison, selection.


def _compares(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def lower(out: Shape, a: Tensor, b: Any) -> Tensor:
        return function(*promoted(common_type(a, b), a, b))

    return lower


def _on_bits(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda out, a, b: function(*promoted(out.dtype, a, b))


def _on_truths(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda out, a, b: function(converted(a, "pred"), converted(b, "pred"))


def _overloads(name: str) -> list[Any]:
    """Return an operation's overloads for two tensors, or for a tensor and a number."""
    packet = getattr(aten, name)
    named = [kind for kind in ("Tensor", "Scalar", "Tensor_Scalar") if kind in packet.overloads()]
    return [getattr(packet, kind) for kind in named or ["default"]]


for _name, _function in {
    "eq": _compares(hlo.equal),
    "ne": _compares(hlo.not_equal),
    "lt": _compares(hlo.less),
    "le": _compares(hlo.less_equal),
    "gt": _compares(hlo.greater),
    "ge": _compares(hlo.greater_equal),
    "bitwise_and": _on_bits(hlo.logical_and),
    "bitwise_or": _on_bits(hlo.logical_or),
    "bitwise_xor": _on_bits(hlo.logical_xor),
    "bitwise_left_shift": _on_bits(hlo.shift_left),
    "bitwise_right_shift": _on_bits(hlo.shift_right),
    "__lshift__": _on_bits(hlo.shift_left),
    "__rshift__": _on_bits(hlo.shift_right),
    "logical_and": _on_truths(hlo.logical_and),
    "logical_or": _on_truths(hlo.logical_or),
    "logical_xor": _on_truths(hlo.logical_xor),
}.items():
    lowers(*_overloads(_name))(_function)


@lowers(aten.where.self)
def where(out: Shape, condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return hlo.select(condition, *promoted(out.dtype, a, b))


@lowers(aten._to_copy.default)
def to_copy(out: Shape, x: Tensor, dtype: Any = None) -> Tensor:
    return converted(x, out.dtype)
