"""Sums over the devices of several processes, in the order of the devices.

Between processes, XLA's own all-reduce passes sums around a ring. It adds each part of an array in another order than
one process does, so results differ in their last bits. Here each device gets what the others have, and adds it up in
their order. A ring passes n devices 2 (n - 1) times, this only n - 1 times, which is what small arrays cost.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from transformers_neuronx import hlo
from transformers_neuronx.compiler import compile_py_func
from transformers_neuronx.pyhlo import HloModuleProto, HloScribe, Tensor
from transformers_neuronx.pyhlo.computations import entry_of, remove_unreached
from transformers_neuronx.pyhlo.hlo_pb2 import TUPLE, HloComputationProto, HloInstructionProto
from transformers_neuronx.pyhlo.rewriting import shape_of
from transformers_neuronx.pyhlo.shapes import nbytes
from transformers_neuronx.pyhlo.tensors import Shape

FEW = 4  # devices, for which it sends at most twice as much as a ring
SMALL = 2**20  # bytes that any number of devices sends to each other
OPERATIONS = {"add": hlo.add, "maximum": hlo.maximum, "minimum": hlo.minimum, "multiply": hlo.multiply}


def in_order(module: HloModuleProto) -> HloModuleProto:
    """Return the module with all-reduces that add in the order of the devices, where that is not slower."""
    module = HloModuleProto.FromString(module.SerializeToString())
    roots = {each.id: _root(each).opcode for each in module.computations}
    free = 1 + max(
        number for each in module.computations for number in (each.id, *(one.id for one in each.instructions))
    )
    added: list[HloComputationProto] = []
    for computation in module.computations:
        for instruction in computation.instructions:
            if instruction.opcode == "all-reduce" and _pays(instruction):
                written = _entry(instruction, OPERATIONS[roots[instruction.called_computation_ids[0]]])
                free = _renumber(written, free)
                added.append(written)
                _become_call(instruction, written.id)
    callers = list(module.computations)
    del module.computations[:]
    module.computations.extend([*added, *callers])  # XLA reads a computation before those that call it
    remove_unreached(module)
    return module


def _root(computation: HloComputationProto) -> HloInstructionProto:
    return next(each for each in computation.instructions if each.id == computation.root_id)


def _devices(instruction: HloInstructionProto) -> int:
    return len(instruction.replica_groups[0].replica_ids)


def _pays(instruction: HloInstructionProto) -> bool:
    return instruction.shape.element_type != TUPLE and pays(nbytes(instruction.shape), _devices(instruction))


def pays(size: int, devices: int) -> bool:
    """Whether devices send an array of `size` bytes to each other, rather than sums around a ring."""
    return devices <= FEW or size * devices <= SMALL


def _entry(instruction: HloInstructionProto, combine: Callable[[Tensor, Tensor], Tensor]) -> HloComputationProto:
    """Write the computation that gathers, and combines in order."""
    shape, devices = shape_of(instruction.shape), _devices(instruction)
    assert isinstance(shape, Shape)

    def combined(_: HloScribe) -> Tensor:
        own = hlo.reshape(shape.Parameter(parameter_number=0), 1, *shape.sizes)
        groups = [dict(replica_ids=list(group.replica_ids)) for group in instruction.replica_groups]
        gathered = shape.dtype[devices, *shape.sizes].AllGather(own, dimensions=[0], replica_groups=groups)
        narrow = shape.dtype.name in ("bf16", "f16")
        wide = hlo.convert(gathered, "f32") if narrow else gathered
        parts = [hlo.reshape(hlo.slice(wide, 0, i, i + 1), *shape.sizes) for i in range(devices)]
        return hlo.convert(functools.reduce(combine, parts), shape.dtype)

    return entry_of(compile_py_func(combined))


def _renumber(computation: HloComputationProto, free: int) -> int:
    """Give a computation, which calls no others, new numbers. Return the next free one."""
    for instruction in computation.instructions:
        instruction.id += free
        instruction.name = f"{instruction.opcode}.{instruction.id}"
        instruction.operand_ids[:] = [number + free for number in instruction.operand_ids]
    computation.root_id += free
    computation.id += free
    computation.name = f"in_order.{computation.id}"
    return 1 + max(computation.id, *(each.id for each in computation.instructions))


def _become_call(instruction: HloInstructionProto, computation: int) -> None:
    instruction.opcode = "call"
    instruction.called_computation_ids[:] = [computation]
    instruction.ClearField("replica_groups")
