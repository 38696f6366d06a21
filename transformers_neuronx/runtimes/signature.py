"""The parameters and results of a program, and the check of its arguments. Engines check little of them, or nothing."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from transformers_neuronx.errors import EngineError
from transformers_neuronx.hlo.control import weights_of
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
        numbers = weights_of(module)
        adjacent = bool(numbers) and numbers == [*range(numbers[0], numbers[-1] + 1)]
        self.weights = slice(numbers[0], numbers[-1] + 1) if adjacent else slice(0, 0)
        self._all = range(len(self.parameters))
        self._others = [number for number in self._all if not self.weights.start <= number < self.weights.stop]

    def take(self, tensors: Sequence[Argument], known: bool = False) -> None:
        """Check a program's arguments, and mark those that it takes over. Raises EngineError if one is wrong.

        If the weights are `known`, those of the call before, they are not checked again.
        """
        if len(tensors) != len(self.parameters):
            raise EngineError(f"{self.name} needs {len(self.parameters)} arguments, got {len(tensors)}")
        names, checked = self.parameter_names, self._others if known else self._all
        for number in checked:
            if (got := tensors[number].aval) != (wanted := self.parameters[number]):
                raise EngineError(f"{self.name} needs {wanted} as parameter {number}, {names[number]}, got {got}")
        if spent := [names[number] for number in checked if tensors[number].donated]:
            raise EngineError(f"{self.name} got a tensor as {spent[0]} that was donated to an earlier program")
        taken = {id(tensors[number]) for number in self.donated}
        if sum(id(tensors[number]) in taken for number in checked) > len(taken):
            raise EngineError(f"{self.name} got one tensor twice, but can take over its memory only once")
        for number in self.donated:
            tensors[number].donated = True
