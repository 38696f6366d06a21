"""A traced function as data: its HLO modules, their parameters and their executables, and all of it as bytes.

The bytes are a zip file without weights. One tensor holds them, and other tools can open it.
"""

from __future__ import annotations

import dataclasses
import io
import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from transformers_neuronx.errors import CheckpointError
from transformers_neuronx.pyhlo import HloModuleProto
from transformers_neuronx.pyhlo.dtypes import to_torch
from transformers_neuronx.support import files
from transformers_neuronx.trace.export import Structure
from transformers_neuronx.trace.lowering import Placement
from transformers_neuronx.trace.ranges import Range

FORMAT = 2
DESCRIPTION = "traced.json"
TOLD = ("inputs", "ranges", "weights", "states")  # the fields of a program in the description


class Input(NamedTuple):
    """A tensor that a program takes."""

    dtype: str
    sizes: tuple[int, ...]

    def takes(self, tensor: torch.Tensor) -> bool:
        return tuple(tensor.shape) == self.sizes and tensor.dtype == to_torch(self.dtype)

    def __repr__(self) -> str:
        return f"{to_torch(self.dtype)}{list(self.sizes)}"


@dataclass(frozen=True)
class Program:
    """One module in two forms, with weights as matrices (`plain`) or in panels (`panelled`). A runtime uses one.

    `inputs` are in the order of the function's arguments, with None for one that is no tensor. `ranges` limits the
    indices among the inputs and those that the program computes. `weights` and `states` are numbers in the order of the
    module's parameters. `executable` is the serialized executable, or empty if the runtime cannot serialize it.
    """

    inputs: Sequence[Input | None]
    ranges: Sequence[Range]
    weights: Sequence[int]
    states: Sequence[int]
    plain: HloModuleProto
    panelled: HloModuleProto
    executable: bytes = b""

    def module(self, in_panels: bool) -> HloModuleProto:
        return self.panelled if in_panels else self.plain


@dataclass(frozen=True)
class Traced:
    """A function as programs, one for each bucket of input sizes, with the names of its arguments and weights.

    `structure` says how outputs are nested. `fingerprint` has what the executables depend on in addition to modules.
    """

    arguments: Sequence[str]
    structure: Structure
    weights: Sequence[tuple[str, Placement]]
    programs: Sequence[Program]
    fingerprint: dict[str, str]

    def to_bytes(self) -> bytes:
        described = [{name: getattr(each, name) for name in TOLD} for each in self.programs]
        told = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr(DESCRIPTION, json.dumps(told | dict(format=FORMAT, programs=described)))
            for number, program in enumerate(self.programs):
                archive.writestr(f"{number}.plain.hlo.pb", _bytes(program.plain))
                archive.writestr(f"{number}.panels.hlo.pb", _bytes(program.panelled))
                archive.writestr(f"{number}.executable", program.executable)
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> Traced:
        with files.explain("the traced module is damaged", "trace it again"):
            with zipfile.ZipFile(io.BytesIO(data)) as archive:  # reads check the CRC
                told = json.loads(archive.read(DESCRIPTION))
                if told.pop("format") != FORMAT:
                    raise CheckpointError("the traced module is from another version of this package: trace it again")
                programs = [_program(archive, number, each) for number, each in enumerate(told.pop("programs"))]
            weights = [(name, _placement(*placed)) for name, placed in told.pop("weights")]
            return cls(programs=programs, weights=weights, **told)


def _bytes(module: HloModuleProto) -> bytes:
    return module.SerializeToString(deterministic=True)


def _placement(dtype: str, sizes: Sequence[int], *more: Any) -> Placement:
    return Placement(dtype, tuple(sizes), *more)


def _program(archive: zipfile.ZipFile, number: int, told: dict[str, Any]) -> Program:
    return Program(
        inputs=[each and Input(each[0], tuple(each[1])) for each in told["inputs"]],
        ranges=[Range(*each) for each in told["ranges"]],
        weights=told["weights"],
        states=told["states"],
        plain=HloModuleProto.FromString(archive.read(f"{number}.plain.hlo.pb")),
        panelled=HloModuleProto.FromString(archive.read(f"{number}.panels.hlo.pb")),
        executable=archive.read(f"{number}.executable"),
    )
