"""The types of instances that programs are compiled for, and their differences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from transformers_neuronx.errors import ConfigError


@dataclass(frozen=True)
class Target:
    """An instance type as `neuronx-cc` names it, with the tensor-parallel `degrees` that its runtime supports.

    `float8` says whether it has 8-bit floats, `sorts` whether it has an operation that sorts.
    """

    name: str
    degrees: tuple[int, ...]
    float8: bool = False
    sorts: bool = True


# Degrees are from the guide to the original, which is older than Trainium2. For trn2, they are those that fill its
# chips evenly. Types and sorting are from the compiler's error codes (NCC_ESPP047, NCC_EVRF029).
TARGETS: Mapping[str, Target] = {
    target.name: target
    for target in (
        Target("trn1", (1, 2, 8, 16, 32)),
        Target("inf2", (1, 2, 4, 8, 24)),
        Target("trn2", (1, 2, 4, 8, 16, 32, 64), float8=True, sorts=False),
    )
}
DEFAULT = "trn1"


def target_named(name: str) -> Target:
    """Return the target called `name`; "neuron" is the default."""
    name = DEFAULT if name == "neuron" else name
    if name not in TARGETS:
        raise ConfigError(f"target must be one of neuron, {', '.join(TARGETS)}, got {name!r}")
    return TARGETS[name]
