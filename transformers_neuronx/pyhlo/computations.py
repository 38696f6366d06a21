"""The computations of a module that are in use."""

from __future__ import annotations

from transformers_neuronx.pyhlo.hlo_pb2 import HloComputationProto, HloModuleProto


def entry_of(module: HloModuleProto) -> HloComputationProto:
    """Return the computation that a module runs."""
    return next(each for each in module.computations if each.id == module.entry_computation_id)


def reached(module: HloModuleProto) -> list[HloComputationProto]:
    """Return the entry computation and all that it calls, directly or not, in the module's order.

    Calls of missing computations are ignored.
    """
    by_id = {computation.id: computation for computation in module.computations}
    numbers, waiting = set(), [module.entry_computation_id]
    while waiting:
        number = waiting.pop()
        if number in by_id and number not in numbers:
            numbers.add(number)
            waiting += [called for each in by_id[number].instructions for called in each.called_computation_ids]
    return [computation for computation in module.computations if computation.id in numbers]


def remove_unreached(module: HloModuleProto) -> None:
    """Remove the computations that nothing calls."""
    kept = reached(module)
    del module.computations[:]
    module.computations.extend(kept)
