"""The parameters and results of a program, and the check of its arguments. Engines check little of them, or nothing."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from transformers_neuronx.errors import EngineError
from transformers_neuronx.pyhlo import HloModuleProto
from transformers_neuronx.pyhlo.dtypes import element_type
from transformers_neuronx.pyhlo.hlo_pb2 import PrimitiveType, ShapeProto
from transformers_neuronx.pyhlo.shapes import arrays_of


class Aval(NamedTuple):
    """Shape and element type in the form that jaxlib needs. Arrays that it returns have one only if it finds JAX."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    weak_type: bool = False

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __repr__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


# One object for each shape and type: comparing hundreds of equal objects at each call would be slow.
aval_of = functools.cache(Aval)


def _aval(array: ShapeProto) -> Aval:
    name = PrimitiveType.Name(array.element_type).lower()
    return aval_of(tuple(array.dimensions), element_type(name).numpy)


class Argument(Protocol):
    """A tensor that is passed to a program."""

    aval: Aval
    donated: bool


class Signature:
    """A module's parameters and results, and for each result that takes a parameter's memory, the parameter."""

    def __init__(self, module: HloModuleProto) -> None:
        self.name = module.name
        shape, aliases = module.host_program_shape, module.input_output_alias.entries
        self.parameters = [_aval(parameter) for parameter in shape.parameters]
        self.parameter_names = list(shape.parameter_names)
        self.results = [_aval(array) for array in arrays_of(shape.result)]
        self.aliases = {(*entry.output_shape_index, 0)[0]: entry.parameter_number for entry in aliases}
        self.donated = dict.fromkeys(self.aliases.values())

    def take(self, tensors: Sequence[Argument]) -> None:
        """Check a program's arguments, and mark those that it takes over. Raises EngineError if one is wrong."""
        got = [tensor.aval for tensor in tensors]
        if len(got) != len(self.parameters):
            raise EngineError(f"{self.name} needs {len(self.parameters)} arguments, got {len(got)}")
        if got != self.parameters:
            wrong = next(i for i, (have, want) in enumerate(zip(got, self.parameters, strict=True)) if have != want)
            raise EngineError(
                f"{self.name} needs {self.parameters[wrong]} as parameter {wrong}, "
                f"{self.parameter_names[wrong]}, got {got[wrong]}"
            )
        if spent := [name for name, tensor in zip(self.parameter_names, tensors, strict=True) if tensor.donated]:
            raise EngineError(f"{self.name} got a tensor as {spent[0]} that was donated to an earlier program")
        taken = {id(tensors[number]) for number in self.donated}
        if sum(id(tensor) in taken for tensor in tensors) > len(taken):
            raise EngineError(f"{self.name} got one tensor twice, but can take over its memory only once")
        for number in self.donated:
            tensors[number].donated = True
