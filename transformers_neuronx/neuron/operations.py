"""Replacements for operations that Neuron's compiler lacks, and the compiler's own custom calls for composites.

A custom call's target, operands and configuration are the same as in Neuron's public frontends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from transformers_neuronx import hlo
from transformers_neuronx.pyhlo import Tensor, dtype_named
from transformers_neuronx.pyhlo.hlo_pb2 import HloInstructionProto

Alternative = Callable[..., Tensor | tuple[Tensor, ...] | None]


def _custom(target: str, x: Tensor, *more: Tensor, config: object = "") -> Tensor:
    """Return a custom call whose result has the shape of its first operand."""
    y: Tensor = x.shape.CustomCall(x, *more, custom_call_target=target, backend_config=str(config))
    return y


def static_ring(x: Tensor) -> Tensor:
    """Return a weight that is brought to where it is used by transfers that are set up once."""
    return _custom("AwsNeuronTransferWithStaticRing", x)


# Composites.


def _softmax(x: Tensor) -> Tensor:
    return _custom("AwsNeuronSoftmax", x, config=len(x.sizes) - 1)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = hlo.convert(x, "f32")
    y = _custom("AwsNeuronRmsNorm", y, weight, hlo.constant(eps, "f32"), config=len(x.sizes) - 1)
    return hlo.convert(y, x.dtype)


EXCHANGED: Mapping[str, Callable[..., Tensor]] = dict(
    gelu=lambda x: _custom("AwsNeuronGelu", x),
    gelu_tanh=lambda x: _custom("AwsNeuronGeluApprxTanh", x),
    silu=lambda x: _custom("AwsNeuronSilu", x),
    softmax=_softmax,
    rms_norm=_rms_norm,
)

# Operations. A function gets the operation that a reduction combines with, the instruction, and its operands. It
# returns None if the instruction needs no replacement.


def _is_finite(_: str, __: HloInstructionProto, x: Tensor) -> Tensor:
    return hlo.abs(x) < math.inf


def _log1p(_: str, __: HloInstructionProto, x: Tensor) -> Tensor:
    """Use the series of 2 artanh(x / (2 + x)) near zero. Compilers simplify away corrections for rounding 1 + x."""
    near = hlo.abs(x) < 0.5
    ratio = hlo.select(near, x, 0.0) / (hlo.select(near, x, 0.0) + 2.0)
    square, series = ratio * ratio, hlo.full(1 / 13, x.dtype, x.sizes)
    for odd in (11, 9, 7, 5, 3, 1):
        series = series * square + 1 / odd
    return hlo.select(near, ratio * series * 2.0, hlo.log(x + 1.0))


def _round_to_even(_: str, __: HloInstructionProto, x: Tensor) -> Tensor:
    below = hlo.floor(x)
    rest, half = x - below, below * 0.5
    up = hlo.logical_or(rest > 0.5, hlo.logical_and(hlo.equal(rest, 0.5), hlo.not_equal(hlo.floor(half), half)))
    return hlo.select(up, below + 1.0, below)


def _erf(_: str, __: HloInstructionProto, x: Tensor) -> Tensor:
    return _custom("AwsNeuronErf", x)


def _top_k(_: str, instruction: HloInstructionProto, x: Tensor) -> tuple[Tensor, Tensor]:
    """Use rows of one axis: the compiler's call supports no more axes."""
    *lead, count = x.sizes
    rows, sizes = hlo.reshape(x, -1, count), (*lead, instruction.k)
    found = [dtype[rows.sizes[0], instruction.k] for dtype in (x.dtype, dtype_named("u32"))]
    both = x.scribe.tuple(*found).CustomCall(
        rows, custom_call_target="AwsNeuronTopK", backend_config=str(instruction.k)
    )
    values, places = (hlo.element(both, index) for index in range(2))
    return hlo.reshape(values, *sizes), hlo.reshape(hlo.convert(places, "s32"), *sizes)


def _reduce(combined: str, instruction: HloInstructionProto, x: Tensor, *more: Tensor) -> Tensor | None:
    """Reduce predicates as integers: the compiler combines elements only by min, max, add and multiply."""
    if combined not in ("and", "or"):
        return None
    axes = list(instruction.dimensions)
    numbers = hlo.convert(x, "s32")
    return (hlo.min(numbers, axes) if combined == "and" else hlo.max(numbers, axes)) > 0


def _shift_right(_: str, __: HloInstructionProto, x: Tensor, distance: Tensor) -> Tensor | None:
    """Shift as s32: the compiler has arithmetic shifts only for 32 bits."""
    if x.dtype.element.bits == 32:
        return None
    return hlo.convert(hlo.shift_right(hlo.convert(x, "s32"), hlo.convert(distance, "s32")), x.dtype)


def _places(x: Tensor, start: tuple[Tensor, ...], sizes: list[int]) -> tuple[list[int], Tensor]:
    """Return the axes along which a block is smaller than `x`, and its elements' positions there, s32[…, axes].

    A block that would go past the edge is moved to it.
    """
    axes = [axis for axis, size in enumerate(sizes) if size != x.sizes[axis]]
    block = [sizes[axis] for axis in axes]
    columns = []
    for number, axis in enumerate(axes):
        first = hlo.clamp(0, hlo.convert(start[axis], "s32"), x.sizes[axis] - sizes[axis])
        columns.append(hlo.reshape(hlo.iota("s32", block, number) + first, *block, 1))
    return axes, hlo.concatenate(columns, len(axes))


def _rows_first(rank: int, axes: list[int]) -> list[int]:
    """Return the axes of a block in the order of gather and scatter: the indexed ones, then the others."""
    return [*axes, *(axis for axis in range(rank) if axis not in axes)]


def _dynamic_slice(_: str, instruction: HloInstructionProto, x: Tensor, *start: Tensor) -> Tensor:
    sizes = list(instruction.dynamic_slice_sizes)
    if sizes == list(x.sizes):
        return x
    axes, places = _places(x, start, sizes)
    order = _rows_first(len(sizes), axes)
    return hlo.transpose(hlo.gather_rows(x, places, axes), *(order.index(axis) for axis in range(len(sizes))))


def _dynamic_update_slice(_: str, __: HloInstructionProto, x: Tensor, new: Tensor, *start: Tensor) -> Tensor:
    if new.sizes == x.sizes:
        return new
    axes, places = _places(x, start, list(new.sizes))
    return hlo.scatter_rows(x, places, hlo.transpose(new, *_rows_first(len(new.sizes), axes)), axes)


ALTERNATIVES: Mapping[str, Alternative] = {
    "is-finite": _is_finite,
    "log-plus-one": _log1p,
    "round-nearest-even": _round_to_even,
    "erf": _erf,
    "topk": _top_k,
    "reduce": _reduce,
    "shift-right-arithmetic": _shift_right,
    "dynamic-slice": _dynamic_slice,
    "dynamic-update-slice": _dynamic_update_slice,
}
