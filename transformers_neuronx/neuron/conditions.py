"""Conditions of Neuron's operations on their operands and fields: a function for each, which yields violations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from transformers_neuronx.neuron.supported import (
    COMBINERS,
    CUSTOM_CALLS,
    FOREIGN_TYPES,
    INTEGER_DOTS,
    INTEGERS_IN_F32,
    MOST,
    SIGNATURES,
    UNSORTED,
    Refusal,
)
from transformers_neuronx.neuron.targets import Target
from transformers_neuronx.pyhlo.dtypes import ELEMENT_TYPES
from transformers_neuronx.pyhlo.hlo_pb2 import (
    RNG_DEFAULT,
    RNG_UNIFORM,
    HloComputationProto,
    HloInstructionProto,
    LiteralProto,
    PrimitiveType,
    ShapeProto,
)

_NOTHING = HloInstructionProto()
_SAME = frozenset("bitcast-convert broadcast convert copy reshape transpose".split())  # still constant
_WHOLE = frozenset("pred s4 s8 s16 s32 s64 u4 u8 u16 u32 u64".split())


def type_of(shape: ShapeProto) -> str:
    """Return the name of the element type, also for types that PyHLO does not know."""
    try:
        return PrimitiveType.Name(shape.element_type).lower()
    except ValueError:
        return FOREIGN_TYPES.get(shape.element_type, f"element type {shape.element_type:d}")


@dataclass(frozen=True)
class Site:
    """An instruction in its context: the instructions of its computation, `by_id`, in a module for a target."""

    instruction: HloInstructionProto
    by_id: Mapping[int, HloInstructionProto]
    computations: Mapping[int, HloComputationProto]
    target: Target

    def operands(self, of: HloInstructionProto | None = None) -> list[HloInstructionProto]:
        """Return the operands of the instruction, or `of` another. An operand that does not exist is an empty one."""
        wanted = self.instruction if of is None else of
        return [self.by_id.get(number, _NOTHING) for number in wanted.operand_ids]

    def operand(self, index: int) -> HloInstructionProto:
        """Return an operand, or an empty instruction if there are fewer."""
        return next(iter(self.operands()[index:]), _NOTHING)

    def constant(self, value: HloInstructionProto) -> LiteralProto | None:
        """Return the literal that `value` is made of, if that is a constant alone."""
        while value.opcode in _SAME and value.operand_ids:
            value = self.by_id.get(value.operand_ids[0], _NOTHING)
        return value.literal if value.opcode == "constant" else None

    def called(self) -> tuple[HloInstructionProto, list[HloInstructionProto]]:
        """Return the root of the first computation that it calls, and the root's operands."""
        for number in self.instruction.called_computation_ids:
            if number in self.computations:
                by_id = {each.id: each for each in self.computations[number].instructions}
                root = by_id.get(self.computations[number].root_id, _NOTHING)
                return root, [by_id.get(operand, _NOTHING) for operand in root.operand_ids]
        return _NOTHING, []


Condition = Callable[[Site], Iterator[Refusal]]


def _dynamic_update_slice(site: Site) -> Iterator[Refusal]:
    if any(site.constant(start) is None for start in site.operands()[2:]):
        advice = "Scatter the new values (hlo.scatter_rows), or select by position"
        yield Refusal("constant index", "starts at an index that is not constant", advice)


def _power(site: Site) -> Iterator[Refusal]:
    exponent = site.constant(site.operand(1))
    if exponent is None or not _are_whole(exponent):
        advice = "Multiply, or write exp(log(x) * y)"
        yield Refusal("constant exponent", "has an exponent that is not a constant integer", advice)


def _are_whole(literal: LiteralProto) -> bool:
    value: Any = next((value for field, value in literal.ListFields() if field.name != "shape"), ())
    if isinstance(value, bytes):
        if (row := ELEMENT_TYPES.get(type_of(literal.shape))) is None:
            return False
        value = np.frombuffer(value, row.numpy)
    numbers: np.ndarray[Any, Any] = np.asarray(value, np.float64)
    return bool((np.isfinite(numbers) & (numbers == np.floor(numbers))).all())


def _gather(site: Site) -> Iterator[Refusal]:
    instruction = site.instruction
    numbers, sizes = instruction.gather_dimension_numbers, instruction.gather_slice_sizes
    if numbers.operand_batching_dims or numbers.start_indices_batching_dims:
        yield _batching("Look up positions of all axes (hlo.gather_rows), with an iota for the batch")
    cut = [axis for axis in numbers.start_index_map if axis not in numbers.collapsed_slice_dims]
    cut += [axis for axis in numbers.collapsed_slice_dims if list(sizes[axis : axis + 1]) != [1]]
    if cut:
        advice = "Look up single positions (hlo.gather_rows), so that indexed axes drop out of the result"
        yield Refusal("gather", f"takes a slice of axis {cut[0]}, which has an index", advice)
    yield from _places(site, list(numbers.start_index_map), "NCC_EVRF056")


def _scatter(site: Site) -> Iterator[Refusal]:
    numbers = site.instruction.scatter_dimension_numbers
    if numbers.input_batching_dims or numbers.scatter_indices_batching_dims:
        yield _batching("Write to positions of all axes (hlo.scatter_rows), with an iota for the batch")
    dtype = type_of(site.operand(0).shape)
    if dtype in _WHOLE and not _overwrites(site):
        advice = "Scatter f32, and convert the result"
        yield Refusal("scatter", f"combines {dtype} with the old values", advice, "NCC_EVRF016")
    yield from _places(site, list(numbers.scatter_dims_to_operand_dims), "NCC_EVRF031")


def _batching(advice: str) -> Refusal:
    return Refusal("batching dimensions", "has batching dimensions, which are ignored", advice)


def _overwrites(site: Site) -> bool:
    """Whether the update's value, the second of each pair, is kept."""
    root, elements = site.called()
    arrays = len(site.instruction.operand_ids) // 2
    results = elements if root.opcode == "tuple" else [root]
    return all(result.opcode == "parameter" and result.parameter_number >= arrays for result in results)


def _places(site: Site, axes: list[int], code: str) -> Iterator[Refusal]:
    """Check that an axis is long enough for indices that are an unchanged iota."""
    indices, sizes = site.operand(1), site.operand(0).shape.dimensions
    while indices.opcode in ("reshape", "convert", "copy") and indices.operand_ids:
        indices = site.by_id.get(indices.operand_ids[0], _NOTHING)
    if indices.opcode == "iota" and len(axes) == 1 and axes[0] < len(sizes):
        count = indices.shape.dimensions[indices.dimensions[0]] if indices.dimensions else 0
        if count > sizes[axes[0]]:
            message = f"has indices up to {count - 1}, but the axis has size {sizes[axes[0]]}"
            yield Refusal("index out of bounds", message, "Use no more indices than the axis has positions", code)


def _reduce(site: Site) -> Iterator[Refusal]:
    root, operands = site.called()
    initial = site.operands()[len(site.instruction.operand_ids) // 2 :]
    if any(site.constant(value) is None for value in initial):
        advice = "Start from a constant, and combine with the other value afterwards"
        yield Refusal("reduction", "starts from a value that is not constant", advice)
    simple = root.opcode in COMBINERS and all(operand.opcode == "parameter" for operand in operands)
    if not simple or len(initial) > 1:
        by = "several operations" if len(initial) > 1 or root.opcode in COMBINERS else root.opcode
        advice = "Use min, max, add or mul; on the numbers 0 and 1, max is or, and min is and"
        yield Refusal("reduction", f"combines by {by}", advice)


def _reduce_window(site: Site) -> Iterator[Refusal]:
    dimensions, operands = site.instruction.window.dimensions, len(site.instruction.operand_ids)
    if any(each.base_dilation > 1 for each in dimensions):
        yield Refusal("window", "has a base dilation", "Pad between the elements first", "NCC_EVRF017")
    if any(each.window_dilation > 1 for each in dimensions):
        yield Refusal("window", "has a window dilation", "Slice with a stride first", "NCC_EVRF018")
    if operands != 2:
        message, advice = f"has {operands} operands, not 2", "Reduce one array after the other"
        yield Refusal("window", message, advice, "NCC_EVRF019")


def _convolution(site: Site) -> Iterator[Refusal]:
    dimensions = site.instruction.window.dimensions
    if not any(each.base_dilation > 1 for each in dimensions):
        return
    advice = "Pad between the elements first"
    if any(each.window_dilation > 1 for each in dimensions):
        yield Refusal("convolution", "dilates both input and kernel", advice, "NCC_EVRF010")
    if any(each.stride > 1 for each in dimensions):
        yield Refusal("convolution", "has a stride and a dilated input", advice, "NCC_EVRF011")


def _sort(site: Site) -> Iterator[Refusal]:
    if not site.target.sorts:
        yield UNSORTED


def _shift_right_arithmetic(site: Site) -> Iterator[Refusal]:
    dtype = type_of(site.operand(0).shape)
    if dtype not in ("s32", "u32"):
        yield Refusal("shift", f"is of {dtype}, not of 32 bits", "Convert to s32 first", "NCC_EVRF022")


def _rng(site: Site) -> Iterator[Refusal]:
    if site.instruction.distribution != RNG_UNIFORM:
        advice = "Compute that distribution from uniform numbers"
        yield Refusal("random numbers", "has a distribution other than the uniform one", advice)


def _rng_bit_generator(site: Site) -> Iterator[Refusal]:
    if site.instruction.rng_algorithm != RNG_DEFAULT:
        message = "names an algorithm, but only the default is supported"
        yield Refusal("random numbers", message, "Use RNG_DEFAULT, or compute the bits", "NCC_EVRF006")


def _in_f32(site: Site) -> Iterator[Refusal]:
    types = {type_of(operand.shape) for operand in site.operands()} & {"s32", "u32"}
    opcode = site.instruction.opcode
    if types and not (opcode == "dot" and site.target.name in INTEGER_DOTS):
        message = f"computes {min(types)} in f32, which is exact only up to 2^24"
        yield Refusal("integer sums", message, "Convert to f32 first", INTEGERS_IN_F32[opcode])


def _groups(site: Site) -> Iterator[Refusal]:
    degrees = site.target.degrees
    for size in sorted({len(group.replica_ids) for group in site.instruction.replica_groups} - {*degrees}):
        advice = f"Use a tensor-parallel degree of {', '.join(map(str, degrees[:-1]))} or {degrees[-1]}"
        yield Refusal("replica groups", f"joins {size} devices, but no group of {site.target.name} does", advice)


def _custom_call(site: Site) -> Iterator[Refusal]:
    called, operands = site.instruction.custom_call_target, site.operands()
    if called not in CUSTOM_CALLS:
        advice = "Use operations, or one of AWS's custom calls"
        yield Refusal("custom call", f"calls {called!r}, which the compiler does not know", advice, "NCC_EVRF015")
    if (wanted := SIGNATURES.get(called)) is None:
        return
    if len(operands) != 1:
        yield Refusal("custom call", f"gives {called} {len(operands)} operands, not one", "Call it once for each")
    types = ", ".join(sorted(wanted.types))
    for dtype in sorted({type_of(operand.shape) for operand in operands} - wanted.types):
        message = f"gives {called} {dtype}"
        yield Refusal("custom call", message, f"Convert to a type that it takes: {types}", wanted.code)
    config = site.instruction.backend_config
    if not config.isdigit():
        advice = f"Make the backend_config the number {wanted.number} alone, such as '2'"
        yield Refusal("custom call", f"gives {called} a backend_config that is not a number", advice)
    elif called == "AwsNeuronTopK" and int(config) > MOST:
        advice = "Take the largest of each part, and then the largest of those"
        yield Refusal("custom call", f"asks {called} for {int(config)}, but the most is {MOST}", advice, "NCC_EVRF014")


CONDITIONS: Mapping[str, tuple[Condition, ...]] = {
    "all-gather": (_groups,),
    "all-reduce": (_groups, _in_f32),
    "all-to-all": (_groups,),
    "convolution": (_convolution,),
    "custom-call": (_custom_call,),
    "dot": (_in_f32,),
    "dynamic-update-slice": (_dynamic_update_slice,),
    "gather": (_gather,),
    "power": (_power,),
    "reduce": (_reduce,),
    "reduce-scatter": (_groups, _in_f32),
    "reduce-window": (_reduce_window,),
    "rng": (_rng,),
    "rng-bit-generator": (_rng_bit_generator,),
    "scatter": (_scatter,),
    "shift-right-arithmetic": (_shift_right_arithmetic,),
    "sort": (_sort,),
}
