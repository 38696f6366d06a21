"""Schemes: how the matrices of a checkpoint are stored in fewer bits, and how compressed-tensors describes that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers_neuronx.errors import ConfigError

GROUP = 128  # inputs that share a scale by default, as in most published checkpoints of 4 bits


@dataclass(frozen=True)
class Scheme:
    """A form of compressed-tensors for weights. Activations stay in the type of the model.

    `kind` is "int" or "float". `group` inputs share a scale, or all inputs of an output if it is None. With `zeros`,
    each group has a number that stands for zero.
    """

    name: str
    kind: str
    bits: int
    group: int | None = None
    zeros: bool = False

    @property
    def packed(self) -> bool:
        """Whether numbers are packed into words of 32 bits."""
        return self.kind == "int"

    def attributes(self, ignored: Sequence[str]) -> dict[str, Any]:
        """Return the `quantization_config` of a checkpoint whose modules are in this form, but for `ignored` ones."""
        weights = dict(
            num_bits=self.bits,
            type=self.kind,
            symmetric=not self.zeros,
            strategy="channel" if self.group is None else "group",
            group_size=self.group,
            dynamic=False,
        )
        which = "pack-quantized" if self.packed else "float-quantized"
        groups = dict(group_0=dict(targets=["Linear"], weights=weights, input_activations=None, format=which))
        return dict(
            quant_method="compressed-tensors",
            quantization_status="compressed",
            format=which,
            config_groups=groups,
            ignore=list(ignored),
        )


# Names as in llm-compressor. Its FP8 also quantizes activations; weights alone are A16 there in all names.
SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme("W8A16", "int", 8),
        Scheme("W4A16", "int", 4, GROUP),
        Scheme("W4A16_ASYM", "int", 4, GROUP, zeros=True),
        Scheme("FP8A16", "float", 8),
    )
}


def scheme_named(name: str, group: int | None = None) -> Scheme:
    """Return a scheme, with another `group` of inputs if one is given. Raises ConfigError if there is no such one."""
    if name not in SCHEMES:
        raise ConfigError(f"the scheme must be one of {', '.join(SCHEMES)}, got {name!r}")
    scheme = SCHEMES[name]
    if group is None:
        return scheme
    if scheme.group is None:
        grouped = ", ".join(each.name for each in SCHEMES.values() if each.group)
        raise ConfigError(f"{name} has one scale for each output; a group size is for {grouped}: leave it out")
    if group < 8 or group % 8:
        raise ConfigError(f"the group size must be a multiple of 8, got {group}; take 32, 64 or {GROUP}")
    return Scheme(name, scheme.kind, scheme.bits, group, scheme.zeros)
