"""Weights as programs see them: parameters of a graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from transformers_neuronx.hlo import Parameters
from transformers_neuronx.pyhlo import Tensor, dtype_named
from transformers_neuronx.weights.rows import MINIMUM, ORDER, SCALE, UNIT, Weight, matrix_of


@dataclass(frozen=True)
class Parameter:
    """A weight inside a graph: one device's shard, and the row that it is a shard of.

    `dtype` is the element type of the activations; with a `scale`, the tensor must be multiplied by it. A `minimum` is
    what the smallest value of a group stands for. With units, scales and minima are whole numbers of them. With an
    `order`, s32[in], inputs stand by group: it has one more than the number of each, or zero for one that is padding.
    """

    tensor: Tensor
    row: Weight
    degree: int
    dtype: str
    scale: Tensor | None = None
    minimum: Tensor | None = None
    scale_unit: Tensor | None = None
    minimum_unit: Tensor | None = None
    order: Tensor | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the shard, as a matrix."""
        return self.row.share(self.degree)

    @property
    def storage(self) -> tuple[Any, ...]:
        """A key that is equal for weights that one operation can multiply."""
        of_scale = None if self.scale is None else (self.scale.dtype.name, *self._inputs(self.scale))
        of_unit = None if self.scale_unit is None else (self.scale_unit.dtype.name, *self._inputs(self.scale_unit))
        values = self.tensor.dtype.name, *self._inputs(self.tensor), self.row.codes
        return self.row.word, self.row.rounded, values, of_scale, of_unit, self.minimum is None

    def _inputs(self, part: Tensor) -> tuple[int, ...]:
        """How many axes a part of a matrix has, and the size of the one that is of inputs."""
        sizes = part.sizes[1:] if self.row.experts else part.sizes
        return len(sizes), *sizes[1:2]


def declare(
    table: Sequence[Weight], parameters: Parameters, dtype: str, degree: int, scope: str = "", root: Any = None
) -> Any:
    """Declare the table's rows as parameters of the open graph: `w.attn.q.weight` of the result is a `Parameter`.

    They join the weights of `root`, if it is given.
    """
    root = root or SimpleNamespace()
    add = parameters.add
    shares = {r.name: add(dtype_named(r.dtype or dtype)[r.held(degree)], scope + r.name, weight=True) for r in table}
    for row in table:
        if matrix_of(row.name) != row.name:
            continue
        *path, leaf = row.name.split(".")
        node = root
        for part in path:
            node = node.__dict__.setdefault(part, SimpleNamespace())
        ends = (SCALE, MINIMUM, SCALE + UNIT, MINIMUM + UNIT, ORDER)
        parts = (shares.get(row.name + end) for end in ends)
        setattr(node, leaf, Parameter(shares[row.name], row, degree, dtype, *parts))
    return root
