"""Weights as programs see them: parameters of a graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from transformers_neuronx.hlo import Parameters
from transformers_neuronx.pyhlo import Tensor, dtype_named
from transformers_neuronx.weights.rows import SCALE, Weight


@dataclass(frozen=True)
class Parameter:
    """A weight inside a graph: one device's shard, and the row that it is a shard of.

    `dtype` is the element type of the activations; with a `scale`, the tensor must be multiplied by it.
    """

    tensor: Tensor
    row: Weight
    degree: int
    dtype: str
    scale: Tensor | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the shard, as a matrix."""
        return self.row.share(self.degree)

    @property
    def storage(self) -> tuple[Any, ...]:
        """A key that is equal for weights that one operation can multiply."""
        return self.row.word, self.row.rounded, self.tensor.dtype.name, self.scale is None


def declare(table: Sequence[Weight], parameters: Parameters, dtype: str, degree: int, scope: str = "") -> Any:
    """Declare the table's rows as parameters of the open graph: `w.attn.q.weight` of the result is a `Parameter`."""
    root = SimpleNamespace()
    add = parameters.add
    shares = {r.name: add(dtype_named(r.dtype or dtype)[r.held(degree)], scope + r.name, weight=True) for r in table}
    for row in table:
        if row.name.endswith(SCALE):
            continue
        *path, leaf = row.name.split(".")
        node = root
        for part in path:
            node = node.__dict__.setdefault(part, SimpleNamespace())
        setattr(node, leaf, Parameter(shares[row.name], row, degree, dtype, shares.get(row.name + SCALE)))
    return root
