"""What a program takes and returns, and the check of its arguments: engines compare little of them, or nothing."""

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
    """Shape and element type, in the form jaxlib asks for. What it returns has one only where it finds JAX."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    weak_type: bool = False

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __repr__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


# Of a shape and a type there is one: to compare hundreds of equal objects, at each call, would be slow.
aval_of = functools.cache(Aval)


def _aval(array: ShapeProto) -> Aval:
    name = PrimitiveType.Name(array.element_type).lower()
    return aval_of(tuple(array.dimensions), element_type(name).numpy)


class Argument(Protocol):
    """What is passed to a program."""

    aval: Aval
    donated: bool


class Signature:
    """Of a module: its parameters and results, and for each result that takes a parameter's memory, which one."""

    def __init__(self, module: HloModuleProto) -> None:
        self.name = module.name
        shape, aliases = module.host_program_shape, module.input_output_alias.entries
        self.parameters = [_aval(parameter) for parameter in shape.parameters]
        self.parameter_names = list(shape.parameter_names)
        self.results = [_aval(array) for array in arrays_of(shape.result)]
        self.aliases = {(*entry.output_shape_index, 0)[0]: entry.parameter_number for entry in aliases}
        self.donated = dict.fromkeys(self.aliases.values())

    def take(self, tensors: Sequence[Argument]) -> None:
        """Check a program's arguments, and note which of them it takes over. EngineError says what is wrong."""
        got = [tensor.aval for tensor in tensors]
        if len(got) != len(self.parameters):
            raise EngineError(f"{self.name} wants {len(self.parameters)} arguments, got {len(got)}")
        if got != self.parameters:
            wrong = next(i for i, (have, want) in enumerate(zip(got, self.parameters, strict=True)) if have != want)
            raise EngineError(
                f"{self.name} wants {self.parameters[wrong]} as parameter {wrong}, "
                f"{self.parameter_names[wrong]}, got {got[wrong]}"
            )
        if spent := [name for name, tensor in zip(self.parameter_names, tensors, strict=True) if tensor.donated]:
            raise EngineError(f"{self.name} got a tensor as {spent[0]} that was donated to an earlier program")
        taken = {id(tensors[number]) for number in self.donated}
        if sum(id(tensor) in taken for tensor in tensors) > len(taken):
            raise EngineError(f"{self.name} got one tensor twice, of which it takes the memory once")
        for number in self.donated:
            tensors[number].donated = True
