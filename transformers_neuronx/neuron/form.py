"""Rewrite a module in the form that Neuron needs: one computation without control flow, of operations that it knows.

Calls are inlined. A conditional becomes both of its branches and a select between their results. A loop with a known
number of rounds becomes that many copies of its body. Composites for which the compiler has its own code become its
custom calls. Every instruction keeps the source line that it came from. Other loops are left unchanged; `rules` reports
what the compiler would refuse.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from transformers_neuronx import hlo
from transformers_neuronx.hlo.control import ROUNDS, WEIGHT, composite_call
from transformers_neuronx.neuron.operations import ALTERNATIVES, EXCHANGED, static_ring
from transformers_neuronx.pyhlo import HloModuleProto, HloScribe, Tensor
from transformers_neuronx.pyhlo.computations import entry_of, remove_unreached
from transformers_neuronx.pyhlo.hlo_pb2 import HloComputationProto, HloInstructionProto
from transformers_neuronx.pyhlo.rewriting import RewritingScribe

Value: TypeAlias = "Tensor | list[Value]"  # a tuple without an instruction is a list


def neuron_form(module: HloModuleProto) -> HloModuleProto:
    """Return the same program for Neuron, with the same parameters, results and aliases. `module` is unchanged."""
    scribe = RewritingScribe()
    formed = scribe(_Rewriter(module, scribe)).module_proto
    _remove_unused(formed)
    formed.name, formed.entry_computation_name = module.name, module.entry_computation_name
    formed.input_output_alias.CopyFrom(module.input_output_alias)
    formed.host_program_shape.parameter_names[:] = module.host_program_shape.parameter_names
    return formed


class _Rewriter:
    """A PyHLO function that writes a module in Neuron's form."""

    def __init__(self, module: HloModuleProto, scribe: RewritingScribe) -> None:
        self.scribe = scribe
        self.entry = module.entry_computation_id
        self.computations = {computation.id: computation for computation in module.computations}
        self.rewriting: dict[str, Callable[..., Value]] = {
            "tuple": lambda _, *operands: list(operands),
            "get-tuple-element": self._element,
            "opt-barrier": lambda _, operand: operand,  # it only affects XLA
            "parameter": self._parameter,
            "call": self._call,
            "conditional": self._conditional,
            "while": self._while,
        }

    def __call__(self, _: HloScribe) -> Any:
        return self._written(self.computations[self.entry])

    def _written(self, computation: HloComputationProto, arguments: Sequence[Value] | None = None) -> Value:
        """Write a computation's instructions here, for these arguments or with parameters. Returns their result."""
        values: dict[int, Value] = {}
        for instruction in computation.instructions:
            if instruction.opcode == "parameter" and arguments is not None:
                values[instruction.id] = arguments[instruction.parameter_number]
            else:
                operands = [values[number] for number in instruction.operand_ids]
                with self.scribe.source(instruction.metadata):
                    values[instruction.id] = self._rewritten(instruction, operands)
        return values[computation.root_id]

    def _rewritten(self, instruction: HloInstructionProto, operands: list[Value]) -> Value:
        if instruction.opcode in self.rewriting:
            return self.rewriting[instruction.opcode](instruction, *operands)
        if instruction.opcode in ALTERNATIVES:
            alternative = ALTERNATIVES[instruction.opcode](self._combined(instruction), instruction, *operands)
            if alternative is not None:
                return list(alternative) if isinstance(alternative, tuple) else alternative
        return self._copy(instruction, *operands)

    def _copy(self, instruction: HloInstructionProto, *operands: Value) -> Tensor:
        called = [self._nested(self.computations[number]) for number in instruction.called_computation_ids]
        return self.scribe.copy(instruction, [_as_tensor(operand) for operand in operands], called)

    def _nested(self, computation: HloComputationProto) -> int:
        """Return the number of a called computation, such as a reduction's."""

        def written(_: HloScribe) -> Any:
            return self._written(computation)

        return self.scribe.computation(written, computation.name.partition(".")[0], key=computation.id)[0]

    def _combined(self, instruction: HloInstructionProto) -> str:
        """Return the operation that a reduction combines elements with."""
        for number in instruction.called_computation_ids:
            computation = self.computations[number]
            return next(each.opcode for each in computation.instructions if each.id == computation.root_id)
        return ""

    def _parameter(self, instruction: HloInstructionProto) -> Tensor:
        parameter = self._copy(instruction)
        return static_ring(parameter) if WEIGHT in instruction.frontend_attributes.map else parameter

    def _element(self, instruction: HloInstructionProto, whole: Value) -> Value:
        return whole[instruction.tuple_index] if isinstance(whole, list) else self._copy(instruction, whole)

    def _call(self, instruction: HloInstructionProto, *operands: Value) -> Value:
        call = composite_call(instruction)
        exchange = EXCHANGED.get(call.name) if call else None
        if call and exchange and {*inspect.signature(exchange).parameters} == {*call.operands, *call.attributes}:
            return exchange(**dict(zip(call.operands, operands, strict=True)), **call.attributes)
        return self._written(self.computations[instruction.called_computation_ids[0]], operands)

    def _conditional(self, instruction: HloInstructionProto, predicate: Value, *operands: Value) -> Value:
        branches = [self.computations[number] for number in instruction.called_computation_ids]
        if not isinstance(predicate, Tensor) or predicate.dtype.name != "pred":
            return self._copy(instruction, predicate, *operands)
        results = [self._written(branch, [operand]) for branch, operand in zip(branches, operands, strict=True)]
        return _chosen(predicate, *results)

    def _while(self, instruction: HloInstructionProto, state: Value) -> Value:
        rounds = instruction.frontend_attributes.map.get(ROUNDS)
        if rounds is None:
            return self._copy(instruction, state)
        body = self.computations[instruction.called_computation_ids[0]]
        for _ in range(int(rounds)):
            state = self._written(body, [state])
        return state


def _as_tensor(value: Value) -> Tensor:
    if isinstance(value, Tensor):
        return value
    elements = [_as_tensor(each) for each in value]
    whole: Tensor = elements[0].scribe.tuple(*(each.shape for each in elements)).Tuple(*elements)
    return whole


def _chosen(predicate: Tensor, on_true: Value, on_false: Value) -> Value:
    if isinstance(on_true, list) and isinstance(on_false, list):
        return [_chosen(predicate, *pair) for pair in zip(on_true, on_false, strict=True)]
    assert isinstance(on_true, Tensor) and isinstance(on_false, Tensor)
    return on_true if on_true is on_false else hlo.select(predicate, on_true, on_false)


def _remove_unused(module: HloModuleProto) -> None:
    """Remove instructions that no result depends on, except parameters."""
    entry = entry_of(module)
    used = {entry.root_id}
    for instruction in reversed(entry.instructions):  # operands come before the instructions that use them
        if instruction.id in used or instruction.opcode == "parameter":
            used |= {instruction.id, *instruction.operand_ids}
    kept = [instruction for instruction in entry.instructions if instruction.id in used]
    del entry.instructions[:]
    entry.instructions.extend(kept)
    remove_unreached(module)
