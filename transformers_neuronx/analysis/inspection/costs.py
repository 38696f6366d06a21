"""What the operations of a module cost: floating-point operations, and bytes read and written, by kind and by layer.

Costs are counted from the module alone, before any compiler. A composite is one operation with its own name. An
instruction outside of composites is an operation with its opcode as the name.

FLOPs: a product (dot, convolution) has two per multiplication, without the zeros that a `pad` inserted. Elementwise
operations have one per element of the result; reductions, sorts and sums over devices one per element of the operand.
Operations that only move numbers have none. A composite has all those of its body.

Bytes: what an operation reads from arrays in memory and writes to them. For a composite, these are its operands and
results. A chain of elementwise operations is one loop: only the arrays at its ends count, for the operation that it
ends in. Gathers and slices read what they return, and updates in place write what is new. Attention reads the cache
positions that the program is compiled to look back to, and writes those of the new tokens. Layers with a state read and
write that of each sequence. A weight that several operations read counts for each of them.

The body of a loop counts once, so costs inside of loops are for one iteration. Of a conditional's branches, the most
expensive counts. All numbers are for one device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from transformers_neuronx.analysis.inspection.flow import ELEMENTWISE, Flow, composite_of
from transformers_neuronx.hlo.control import CompositeCall, composite_call
from transformers_neuronx.layers.rows import columns
from transformers_neuronx.layers.step import SEGMENT
from transformers_neuronx.pyhlo.hlo_pb2 import HloInstructionProto
from transformers_neuronx.pyhlo.shapes import element_bits, elements, nbytes
from transformers_neuronx.runtimes.kernels import updated

PRODUCTS = frozenset("convolution dot".split())
PER_OPERAND = frozenset(
    """
    all-reduce batch-norm-inference batch-norm-training map reduce reduce-scatter scatter select-and-scatter sort topk
    """.split()
)
OUTSIDE = "(outside)"  # of all layers
_ROWS = dict(put_rows="rows", with_tokens="tokens", advance="sampled")  # what a composite writes into rows of an array
_MULTIPLIED = frozenset("bitcast convert copy reshape transpose".split())  # keep the zeros of a pad


@dataclass(frozen=True)
class Cost:
    """Cost of the operations of one kind in one layer: how many, FLOPs, FLOPs of products, and bytes.

    `layer` is the scope that they were written in. `loops` is the number of loops around them.
    """

    layer: str
    op: str
    loops: int
    count: int = 0
    flops: int = 0
    products: int = 0
    read: int = 0
    written: int = 0


class _Flops(NamedTuple):
    all: int
    products: int


def costs_of(flow: Flow) -> list[Cost]:
    """Return the costs of a computation and all that it calls, in the order in which kinds first appear."""
    return added(_costs(flow, OUTSIDE, 0))


def added(costs: Iterable[Cost]) -> list[Cost]:
    """Add up the costs of each layer, kind and depth of loops."""
    sums: dict[tuple[str, str, int], list[int]] = {}
    for cost in costs:
        numbers = cost.count, cost.flops, cost.products, cost.read, cost.written
        total = sums.setdefault((cost.layer, cost.op, cost.loops), [0] * len(numbers))
        total[:] = map(sum, zip(total, numbers, strict=True))
    return [Cost(*key, *numbers) for key, numbers in sums.items()]


def _costs(flow: Flow, around: str, loops: int) -> Iterator[Cost]:
    for instruction in flow.instructions:
        scope = instruction.metadata.op_name.partition("/")
        layer = scope[0] if scope[1] else around
        if instruction.opcode == "while":
            for part in flow.flows.called(instruction):
                yield from _costs(part, layer, loops + 1)
        elif instruction.opcode == "conditional":
            branches = [list(_costs(branch, layer, loops)) for branch in flow.flows.called(instruction)]
            yield from max(branches, key=_weight)
        elif instruction.opcode == "call" and not composite_of(instruction):
            yield from _costs(flow.flows.called(instruction)[0], layer, loops)
        else:
            flops, (read, written) = _flops(flow, instruction), _moved(flow, instruction)
            op = composite_of(instruction) or instruction.opcode
            works = bool(flops.all or composite_of(instruction))
            if works:
                yield Cost(layer, op, loops, 1, *flops)
            if read or written:
                within = flow.within.get(instruction.id)
                op = op if within is None else composite_of(flow.by_id[within])
                yield Cost(layer, op, loops, int(not works), 0, 0, read, written)


def _weight(costs: Sequence[Cost]) -> tuple[int, int]:
    return sum(cost.flops for cost in costs), sum(cost.read + cost.written for cost in costs)


def _flops(flow: Flow, instruction: HloInstructionProto) -> _Flops:
    if instruction.opcode in ELEMENTWISE:
        return _Flops(elements(instruction.shape), 0)
    if instruction.opcode in PER_OPERAND:
        return _Flops(elements(flow.operands(instruction)[0].shape), 0)
    if instruction.opcode == "reduce-window":
        window = math.prod(dimension.size for dimension in instruction.window.dimensions)
        return _Flops(elements(instruction.shape) * window, 0)
    if instruction.opcode in PRODUCTS:
        count = _dot(flow, instruction) if instruction.opcode == "dot" else _convolution(flow, instruction)
        return _Flops(count, count)
    inside = [_whole(part) for part in flow.flows.called(instruction)]
    if instruction.opcode == "conditional":
        return max(inside)
    return _Flops(*map(sum, zip(_Flops(0, 0), *inside, strict=True)))


def _whole(flow: Flow) -> _Flops:
    each = [_flops(flow, instruction) for instruction in flow.instructions]
    return _Flops(*map(sum, zip(_Flops(0, 0), *each, strict=True)))


def _dot(flow: Flow, dot: HloInstructionProto) -> int:
    lhs, rhs = flow.operands(dot)
    contracted = math.prod(lhs.shape.dimensions[axis] for axis in dot.dot_dimension_numbers.lhs_contracting_dimensions)
    count = 2 * elements(dot.shape) * contracted
    for operand in (lhs, rhs):
        if padded := elements(operand.shape):
            count = count * _without_padding(flow, operand) // padded
    return count


def _without_padding(flow: Flow, operand: HloInstructionProto) -> int:
    """Return how many elements of an operand are not zeros of a `pad`."""
    seen = operand
    while seen.opcode in _MULTIPLIED:
        seen = flow.operands(seen)[0]
    return elements((flow.operands(seen)[0] if seen.opcode == "pad" else operand).shape)


def _convolution(flow: Flow, convolution: HloInstructionProto) -> int:
    """Count the products: for each number of the result, the numbers of the kernel for one output feature."""
    kernel = flow.operands(convolution)[1].shape
    features = kernel.dimensions[convolution.convolution_dimension_numbers.kernel_output_feature_dimension]
    return 2 * elements(convolution.shape) * elements(kernel) // max(features, 1)


def _moved(flow: Flow, instruction: HloInstructionProto) -> tuple[int, int]:
    """Return the bytes that an instruction reads and writes, itself or for the loop that ends in it."""
    if instruction.id not in flow.arrays:
        return 0, 0
    call = composite_call(instruction)
    if call and (arrays := updated(call)):
        if rows := _ROWS.get(call.name):
            return sum(flow.reads_of(instruction, arrays).values()), nbytes(flow.by_id[call.operands[rows]].shape)
        return (_states if "table" in call.operands else _attention)(flow, instruction, call)
    written = nbytes(instruction.shape)
    if instruction.opcode == "dynamic-update-slice":
        written = nbytes(flow.operands(instruction)[1].shape)
    elif instruction.opcode == "scatter":
        written = nbytes(flow.operands(instruction)[2].shape)
    return sum(flow.reads_of(instruction).values()), written


def _attention(flow: Flow, instruction: HloInstructionProto, call: CompositeCall) -> tuple[int, int]:
    """Count the positions of the cache, [slots * kv_heads, positions, d], in reach of each sequence, and new ones."""
    shapes = {name: flow.by_id[number].shape for name, number in call.operands.items()}
    rows, tokens, kv_heads, _ = shapes["k"].dimensions
    reach, sequences = shapes["cache.0"].dimensions[1], rows
    if "segments" in shapes:  # rows are tokens; each sequence has a table of pages
        sequences, fields = shapes["segments"].dimensions
        reach *= fields - columns(SEGMENT)
    reach = min(call.attributes.get("width", reach), reach)
    cache = updated(call)
    read, written = sum(flow.reads_of(instruction, cache).values()), nbytes(instruction.shape.tuple_shapes[0])
    for number in cache:
        shape = flow.by_id[number].shape
        position = kv_heads * shape.dimensions[2] * element_bits(shape) // 8
        read += position * sequences * reach
        written += position * rows * tokens
    return read, written


def _states(flow: Flow, instruction: HloInstructionProto, call: CompositeCall) -> tuple[int, int]:
    """Count the states, [places, ...], of each sequence, which have a row of the table."""
    arrays, [sequences, _] = updated(call), flow.by_id[call.operands["table"]].shape.dimensions
    shapes = [flow.by_id[number].shape for number in arrays]
    own = sequences * sum(nbytes(shape) // shape.dimensions[0] for shape in shapes)
    read, written = sum(flow.reads_of(instruction, arrays).values()), nbytes(instruction.shape.tuple_shapes[0])
    return read + own, written + own
