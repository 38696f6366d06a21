"""Which computations of a module are in use."""

from __future__ import annotations

from transformers_neuronx.pyhlo.hlo_pb2 import HloComputationProto, HloModuleProto


def reached(module: HloModuleProto) -> list[HloComputationProto]:
    """The entry computation and all that are called from there, in the module's order.

    What is called and is not there is passed over.
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
    """Leave out the computations that nothing calls any more."""
    kept = reached(module)
    del module.computations[:]
    module.computations.extend(kept)
