"""Elementwise operations. Operands broadcast as in NumPy; element types are never mixed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np

from transformers_neuronx.errors import GraphError
from transformers_neuronx.pyhlo import DType, Tensor, dtype_named
from transformers_neuronx.pyhlo.dtypes import COMPLEX, FLOATS, INTEGERS, limits

Operand = Tensor | float | int | bool
_broadcast_sizes = lru_cache(maxsize=1024)(np.broadcast_shapes)
SIGNED = frozenset(name for name in INTEGERS if name.startswith("s"))


def as_dtype(dtype: DType | str) -> DType:
    """Return `dtype`, or the element type of that name."""
    return dtype_named(dtype) if isinstance(dtype, str) else dtype


def constant(value: Any, dtype: DType | str) -> Tensor:
    """A constant with the shape of `value`: a number, a nested list or a NumPy array."""
    array = np.asarray(value)
    return as_dtype(dtype)[array.shape].Constant(constant_value=array)


def full(value: float, dtype: DType | str, sizes: Sequence[int]) -> Tensor:
    """A tensor of `sizes` filled with `value`."""
    scalar = constant(value, dtype)
    return scalar if not sizes else scalar.dtype[sizes].Broadcast(scalar, dimensions=[])


def broadcast_to(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """Broadcast `x` to `sizes` as in NumPy: aligned at the last axis, repeating axes of size 1."""
    sizes = tuple(sizes)
    if x.sizes == sizes:
        return x
    lead = len(sizes) - len(x.sizes)
    if lead < 0 or any(have not in (1, want) for have, want in zip(x.sizes, sizes[lead:], strict=True)):
        raise GraphError(f"broadcast_to needs sizes that {x!r} broadcasts to, got {list(sizes)}")
    kept = [axis for axis, have in enumerate(x.sizes) if have != 1 or sizes[lead + axis] == 1]
    if len(kept) < len(x.sizes):
        x = x.dtype[[x.sizes[axis] for axis in kept]].Reshape(x)
    return x.dtype[sizes].Broadcast(x, dimensions=[lead + axis for axis in kept])


def _together(op: str, *operands: Operand) -> list[Tensor]:
    """Convert the operands to tensors of one shape; numbers take the element type of the tensors."""
    tensors = [operand for operand in operands if isinstance(operand, Tensor)]
    if not tensors:
        raise GraphError(f"{op} needs at least one tensor, got {operands}")
    dtype = tensors[0].dtype
    if any(tensor.dtype is not dtype for tensor in tensors):
        raise GraphError(f"{op} needs one element type, got {' and '.join(map(repr, tensors))}: convert one of them")
    try:
        sizes = _broadcast_sizes(*(tensor.sizes for tensor in tensors))
    except ValueError:
        raise GraphError(f"{op} needs shapes that broadcast, got {' and '.join(map(repr, tensors))}") from None
    for number in operands:
        if not isinstance(number, Tensor) and not _fits(number, dtype):
            raise GraphError(f"{op} needs a number that fits {dtype.name}, the type of {tensors[0]!r}, got {number!r}")
    return [
        broadcast_to(operand, sizes) if isinstance(operand, Tensor) else full(operand, dtype, sizes)
        for operand in operands
    ]


def _fits(number: float, dtype: DType) -> bool:
    if dtype.name in FLOATS | COMPLEX:
        return True
    low, high = limits(dtype.name)
    return low <= number <= high and number == int(number)


@cache
def _snake(op: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", op).lower()


def _require(op: str, x: Tensor, allowed: frozenset[str], meaning: str) -> None:
    if x.dtype.name not in allowed:
        raise GraphError(f"{op} needs {meaning}, got {x!r}")


def _float(op: str, x: Tensor) -> Tensor:
    _require(_snake(op), x, FLOATS, "floating-point elements")
    return getattr(x.shape, op)(x)  # type: ignore[no-any-return]


def _signed(op: str, x: Tensor) -> Tensor:
    _require(_snake(op), x, FLOATS | SIGNED, "signed numbers")
    return getattr(x.shape, op)(x)  # type: ignore[no-any-return]


def _binary(op: str, a: Operand, b: Operand) -> Tensor:
    a, b = _together(_snake(op), a, b)
    return getattr(a.shape, op)(a, b)  # type: ignore[no-any-return]


def _bitwise(op: str, a: Operand, b: Operand) -> Tensor:
    a, b = _together(_snake(op), a, b)
    _require(_snake(op), a, INTEGERS | {"pred"}, "integers or predicates")
    return getattr(a.shape, op)(a, b)  # type: ignore[no-any-return]


def _compare(direction: str, a: Operand, b: Operand) -> Tensor:
    a, b = _together(f"compare {direction}", a, b)
    kind = "FLOAT" if a.dtype.name in FLOATS else "UNSIGNED" if a.dtype.name[0] in "up" else "SIGNED"
    pred = dtype_named("pred")
    return pred[a.sizes].Compare(a, b, comparison_direction=direction, comparison_type=kind)


# One operand.


def abs(x: Tensor) -> Tensor:
    """Absolute value of signed numbers."""
    return _signed("Abs", x)


def ceil(x: Tensor) -> Tensor:
    """Round floats up to an integer."""
    return _float("Ceil", x)


def cos(x: Tensor) -> Tensor:
    """Cosine of floats in radians."""
    return _float("Cos", x)


def erf(x: Tensor) -> Tensor:
    """Error function of floats, 2/√π ∫₀ˣ exp(-t²) dt."""
    return _float("Erf", x)


def exp(x: Tensor) -> Tensor:
    """e to the power of `x`, for floats."""
    return _float("Exp", x)


def expm1(x: Tensor) -> Tensor:
    """exp(x) - 1, accurate near 0, for floats."""
    return _float("Expm1", x)


def floor(x: Tensor) -> Tensor:
    """Round floats down to an integer."""
    return _float("Floor", x)


def is_finite(x: Tensor) -> Tensor:
    """Predicates of the floats that are neither infinite nor NaN."""
    _require("is_finite", x, FLOATS, "floating-point elements")
    return dtype_named("pred")[x.sizes].IsFinite(x)


def log(x: Tensor) -> Tensor:
    """Natural logarithm of floats."""
    return _float("Log", x)


def log1p(x: Tensor) -> Tensor:
    """log(1 + x), accurate near 0, for floats."""
    return _float("Log1p", x)


def logical_not(x: Tensor) -> Tensor:
    """Logical not of predicates; bitwise not of integers."""
    _require("not", x, INTEGERS | {"pred"}, "integers or predicates")
    return x.shape.Not(x)


def logistic(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), for floats."""
    return _float("Logistic", x)


def negate(x: Tensor) -> Tensor:
    """-x, for signed or complex numbers."""
    _require("negate", x, FLOATS | SIGNED | COMPLEX, "signed numbers")
    return x.shape.Negate(x)


def round(x: Tensor) -> Tensor:
    """Round floats to the nearest integer, halves to even, as NumPy and PyTorch do."""
    return _float("RoundNearestEven", x)


def rsqrt(x: Tensor) -> Tensor:
    """1 / sqrt(x), for floats."""
    return _float("Rsqrt", x)


def sign(x: Tensor) -> Tensor:
    """-1, 0 or 1 in the same type, for signed numbers; NaN stays NaN."""
    return _signed("Sign", x)


def sin(x: Tensor) -> Tensor:
    """Sine of floats in radians."""
    return _float("Sin", x)


def sqrt(x: Tensor) -> Tensor:
    """Square root of floats; NaN below 0."""
    return _float("Sqrt", x)


def tan(x: Tensor) -> Tensor:
    """Tangent of floats in radians."""
    return _float("Tan", x)


def tanh(x: Tensor) -> Tensor:
    """Hyperbolic tangent of floats."""
    return _float("Tanh", x)


# Two operands.


def add(a: Operand, b: Operand) -> Tensor:
    """a + b. Integers wrap around."""
    return _binary("Add", a, b)


def atan2(a: Operand, b: Operand) -> Tensor:
    """Angle of the point (b, a) in radians."""
    return _binary("Atan2", a, b)


def divide(a: Operand, b: Operand) -> Tensor:
    """a / b; integer quotients round towards 0."""
    return _binary("Divide", a, b)


def logical_and(a: Operand, b: Operand) -> Tensor:
    """Logical and of predicates; bitwise and of integers."""
    return _bitwise("And", a, b)


def logical_or(a: Operand, b: Operand) -> Tensor:
    """Logical or of predicates; bitwise or of integers."""
    return _bitwise("Or", a, b)


def logical_xor(a: Operand, b: Operand) -> Tensor:
    """Exclusive or of predicates; bitwise for integers."""
    return _bitwise("Xor", a, b)


def maximum(a: Operand, b: Operand) -> Tensor:
    """Larger of two elements; NaN where either is NaN."""
    return _binary("Maximum", a, b)


def minimum(a: Operand, b: Operand) -> Tensor:
    """Smaller of two elements; NaN where either is NaN."""
    return _binary("Minimum", a, b)


def multiply(a: Operand, b: Operand) -> Tensor:
    """a · b. Integers wrap around."""
    return _binary("Multiply", a, b)


def power(a: Operand, b: Operand) -> Tensor:
    """a to the power of b."""
    return _binary("Power", a, b)


def remainder(a: Operand, b: Operand) -> Tensor:
    """Remainder of a / b with the sign of `a`, as C's fmod."""
    return _binary("Remainder", a, b)


def shift_left(a: Operand, b: Operand) -> Tensor:
    """Shift the bits of integers left by `b`, filling with zeros."""
    return _bitwise("ShiftLeft", a, b)


def shift_right(a: Operand, b: Operand) -> Tensor:
    """Shift right by `b`, filling with the sign bit for signed integers and with zeros for unsigned ones."""
    a, b = _together("shift_right", a, b)
    return _bitwise("ShiftRightArithmetic" if a.dtype.name in SIGNED else "ShiftRightLogical", a, b)


def subtract(a: Operand, b: Operand) -> Tensor:
    """a - b. Integers wrap around."""
    return _binary("Subtract", a, b)


def equal(a: Operand, b: Operand) -> Tensor:
    """Predicates of a = b: false where either is NaN."""
    return _compare("EQ", a, b)


def not_equal(a: Operand, b: Operand) -> Tensor:
    """Predicates of a ≠ b: true where either is NaN."""
    return _compare("NE", a, b)


def less(a: Operand, b: Operand) -> Tensor:
    """Predicates of a < b: false where either is NaN."""
    return _compare("LT", a, b)


def less_equal(a: Operand, b: Operand) -> Tensor:
    """Predicates of a ≤ b: false where either is NaN."""
    return _compare("LE", a, b)


def greater(a: Operand, b: Operand) -> Tensor:
    """Predicates of a > b: false where either is NaN."""
    return _compare("GT", a, b)


def greater_equal(a: Operand, b: Operand) -> Tensor:
    """Predicates of a ≥ b: false where either is NaN."""
    return _compare("GE", a, b)


# Three operands, and changes of type.


def select(condition: Tensor, on_true: Operand, on_false: Operand) -> Tensor:
    """`on_true` where `condition` holds, `on_false` elsewhere; NaN in the other branch has no effect."""
    _require("select", condition, frozenset({"pred"}), "predicates as its condition")
    on_true, on_false = _together("select", on_true, on_false)
    try:
        sizes = _broadcast_sizes(condition.sizes, on_true.sizes)
    except ValueError:
        raise GraphError(
            f"select needs shapes that broadcast, got condition {condition!r} and branches {on_true!r}"
        ) from None
    condition, on_true, on_false = (broadcast_to(x, sizes) for x in (condition, on_true, on_false))
    return on_true.shape.Select(condition, on_true, on_false)


def clamp(low: Operand, x: Tensor, high: Operand) -> Tensor:
    """Limit `x` to the interval from `low` to `high`."""
    low, x, high = _together("clamp", low, x, high)
    return x.shape.Clamp(low, x, high)


def convert(x: Tensor, dtype: DType | str) -> Tensor:
    """Convert values to another element type."""
    dtype = as_dtype(dtype)
    return x if x.dtype is dtype else dtype[x.sizes].Convert(x)


def bitcast_convert(x: Tensor, dtype: DType | str) -> Tensor:
    """Reinterpret the bits in another element type of equal width."""
    dtype = as_dtype(dtype)
    if dtype.element.bits != x.dtype.element.bits or "pred" in (dtype.name, x.dtype.name):
        raise GraphError(f"bitcast_convert needs types of equal width, none of them pred, got {x!r} and {dtype!r}")
    return dtype[x.sizes].BitcastConvert(x)
