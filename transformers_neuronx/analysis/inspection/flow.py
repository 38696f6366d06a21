"""Which values of a computation are arrays in memory, and which are fused away. Costs and temporaries build on it.

A compiler turns a chain of elementwise operations into one loop, whose inner values are never in memory. Where a chain
begins and ends is decided here much as XLA:CPU does: a value is an array if it is used by anything but such a loop.
Values that are never used are left out.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping

from transformers_neuronx.hlo.control import COMPOSITE_NAME, composite_call
from transformers_neuronx.neuron.operations import EXCHANGED
from transformers_neuronx.pyhlo import HloModuleProto
from transformers_neuronx.pyhlo.hlo_pb2 import TUPLE, HloComputationProto, HloInstructionProto
from transformers_neuronx.pyhlo.shapes import nbytes
from transformers_neuronx.runtimes.kernels import KERNELS, serves

# The same numbers in the same places, under another name.
VIEWS = frozenset("bitcast bitcast-convert get-tuple-element opt-barrier reshape tuple".split())
# One number of the result from one number of each operand.
ELEMENTWISE = frozenset(
    """
    abs add and atan2 cbrt ceil clamp compare convert cosine count-leading-zeros divide erf exponential
    exponential-minus-one floor is-finite log log-plus-one logistic maximum minimum multiply negate not or popcnt power
    reduce-precision remainder round-nearest-afz round-nearest-even rsqrt select shift-left shift-right-arithmetic
    shift-right-logical sign sine sqrt subtract tan tanh xor
    """.split()
)
# Also fused into their users: operations that move numbers, or make them from nothing.
MOVES = frozenset("broadcast concatenate copy dynamic-slice gather iota pad reverse slice transpose".split())
FUSED = ELEMENTWISE | MOVES
LOOPS = VIEWS - {"opt-barrier"} | {"reduce", "reduce-window"}  # accept fused operands
PICKS = frozenset("dynamic-slice gather slice".split())  # read only what they return of the first operand

Reads = Mapping[tuple[int, int], int]  # bytes, by the numbers of the array and of the operation that picks, or 0


def composite_of(instruction: HloInstructionProto) -> str:
    """Return the name of the composite that an instruction calls, or an empty string."""
    return instruction.frontend_attributes.map.get(COMPOSITE_NAME, "")


def _is_for_others(instruction: HloInstructionProto) -> bool:
    """Whether it is a composite for Neuron alone, which elsewhere is just its body."""
    name = composite_of(instruction)
    return name in EXCHANGED and name not in KERNELS


class Flows:
    """The computations of a module. With `kernels`, a composite that a CPU kernel accepts is a call of that kernel."""

    def __init__(self, module: HloModuleProto, kernels: bool = True) -> None:
        self.module = module
        self.kernels = kernels
        self._computations = {computation.id: computation for computation in module.computations}
        self._flows: dict[int, Flow] = {}
        instructions = (each.id for computation in module.computations for each in computation.instructions)
        self._numbers = itertools.count(max(instructions, default=0) + 1)

    @property
    def entry(self) -> Flow:
        return self[self.module.entry_computation_id]

    def __getitem__(self, number: int) -> Flow:
        if number not in self._flows:
            self._flows[number] = Flow(self, self._written_out(self._computations[number]))
        return self._flows[number]

    def _written_out(self, computation: HloComputationProto) -> HloComputationProto:
        """Return the computation with composites for Neuron alone inlined, as other engines have it."""
        if not any(map(_is_for_others, computation.instructions)):
            return computation
        whole = HloComputationProto(id=computation.id, root_id=computation.root_id)
        for instruction in computation.instructions:
            if not _is_for_others(instruction):
                whole.instructions.append(instruction)
                continue
            body = self._written_out(self._computations[instruction.called_computation_ids[0]])
            numbers = {body.root_id: instruction.id}
            for each in body.instructions:
                if each.opcode == "parameter":
                    numbers[each.id] = instruction.operand_ids[each.parameter_number]
                    continue
                copy = whole.instructions.add()
                copy.CopyFrom(each)
                copy.id = numbers.setdefault(each.id, next(self._numbers))
                copy.operand_ids[:] = [numbers[number] for number in each.operand_ids]
                copy.metadata.op_name = f"{instruction.metadata.op_name}/{each.metadata.op_name}"
        return whole

    def called(self, instruction: HloInstructionProto) -> list[Flow]:
        """Return the computations that an instruction runs: a body and its condition, branches, or the one it calls."""
        return [self[number] for number in instruction.called_computation_ids]


class Flow:
    """One computation: its live instructions in program order, and which of their values are arrays in memory."""

    def __init__(self, flows: Flows, computation: HloComputationProto) -> None:
        self.flows = flows
        self.by_id = {instruction.id: instruction for instruction in computation.instructions}
        self.root = self.by_id[computation.root_id]
        live = self._reached([computation.root_id])
        self.instructions = [each for each in computation.instructions if each.id in live]
        self._reads: dict[int, Reads] = {}
        self.within = self._within() if flows.kernels else {}
        self.arrays = frozenset(self._arrays())

    def operands(self, instruction: HloInstructionProto) -> list[HloInstructionProto]:
        return [self.by_id[number] for number in instruction.operand_ids]

    def _reached(self, numbers: Iterable[int]) -> set[int]:
        waiting, reached = list(numbers), set()
        while waiting:
            if (number := waiting.pop()) not in reached:
                reached.add(number)
                waiting += self.by_id[number].operand_ids
        return reached

    def served(self, instruction: HloInstructionProto) -> bool:
        """Whether a kernel runs it, so that its body does not exist."""
        call = composite_call(instruction) if self.flows.kernels else None
        return call is not None and serves(call, [operand.shape for operand in self.operands(instruction)])

    def _within(self) -> Mapping[int, int]:
        """Map sums that a linear layer's kernel computes to the layer, as `kernels.with_kernels` finds them."""
        uses = Counter(number for instruction in self.instructions for number in instruction.operand_ids)
        sums = {}
        for total in self.instructions:
            if total.opcode != "add":
                continue
            for added in self.operands(total):
                single = added.shape.element_type != TUPLE and uses[added.id] == 1
                if single and composite_of(added) == "linear" and self.served(added):
                    sums[total.id] = added.id
                    break
        return sums

    def fuses(self, instruction: HloInstructionProto) -> bool:
        """Whether its value needs no array if only loops of elementwise operations use it."""
        if instruction.id in self.within:
            return False
        return instruction.opcode in FUSED or instruction.id in self.within.values()

    def _arrays(self) -> Iterator[int]:
        wanted = set(self._wanted())
        for instruction in self.instructions:
            if instruction.opcode in VIEWS or instruction.opcode in ("parameter", "constant"):
                continue
            if not self.fuses(instruction) or instruction.id in wanted:
                yield instruction.id

    def _wanted(self) -> Iterator[int]:
        """Yield the values that must be arrays, seen through views."""
        yield from self.through_views(self.root.id)
        for instruction in self.instructions:
            if instruction.opcode == "gather":  # the table; indices are fused
                yield from self.through_views(instruction.operand_ids[0])
            elif instruction.opcode not in LOOPS and not self.fuses(instruction):
                for number in instruction.operand_ids:
                    yield from self.through_views(number)

    def through_views(self, number: int) -> list[int]:
        """Return the instructions whose values it is, under other names."""
        instruction = self.by_id[number]
        if instruction.opcode not in VIEWS:
            return [number]
        if instruction.opcode == "get-tuple-element" and (whole := self.tuple_of(instruction)).opcode == "tuple":
            return self.through_views(whole.operand_ids[instruction.tuple_index])
        return [seen for operand in instruction.operand_ids for seen in self.through_views(operand)]

    def tuple_of(self, element: HloInstructionProto) -> HloInstructionProto:
        """Return the instruction that made the tuple of a get-tuple-element."""
        [whole] = self.operands(element)
        while whole.opcode == "opt-barrier":
            [whole] = self.operands(whole)
        return whole

    def reads(self, number: int) -> Reads:
        """Return the bytes that a user of this value reads: of its array, or of the arrays that it is computed from."""
        if number not in self._reads:
            self._reads[number] = self._reads_anew(self.by_id[number])
        return self._reads[number]

    def _reads_anew(self, instruction: HloInstructionProto) -> Reads:
        if instruction.opcode == "constant":
            return {}
        if instruction.opcode == "get-tuple-element":
            whole = self.tuple_of(instruction)
            if whole.opcode == "tuple":
                return self.reads(whole.operand_ids[instruction.tuple_index])
            return {(whole.id, -1 - instruction.tuple_index): nbytes(instruction.shape)}
        if instruction.id in self.arrays or instruction.opcode == "parameter":
            return {(instruction.id, 0): nbytes(instruction.shape)}
        return self.reads_of(instruction)

    def reads_of(self, instruction: HloInstructionProto, besides: Collection[int] = ()) -> Reads:
        """Return the bytes of arrays that an instruction reads, including those read for its fused operands.

        The operands `besides` are not counted.
        """
        numbers = [number for number in instruction.operand_ids if number not in besides]
        reads: dict[tuple[int, int], int] = {}
        if instruction.opcode in PICKS and self.reads(picked := numbers.pop(0)):
            reads[picked, instruction.id] = nbytes(instruction.shape)
        elif instruction.opcode == "dynamic-update-slice":
            del numbers[0]  # written in place
        for number in numbers:
            reads |= self.reads(number)
        return reads
