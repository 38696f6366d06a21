"""The arrays of a layer's cache on one device: their sizes, their order as parameters, and how devices divide them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from transformers_neuronx import hlo
from transformers_neuronx.layers.step import Cache, Spread
from transformers_neuronx.pyhlo import Tensor, dtype_named
from transformers_neuronx.pyhlo.dtypes import element_type
from transformers_neuronx.weights.splits import Heads


class CacheArray(NamedTuple):
    """One of the arrays of a `Cache`, as a parameter."""

    name: str
    dtype: str
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class CacheLayout:
    """The cache of a layer with these heads, on each of `degree` devices, for `positions` of each of `slots` sequences.

    Keys and values have the type `dtype`; if they are `scaled`, each head of a position has a scale. With
    `by_position`, devices that would hold copies of a key head divide its positions.
    """

    heads: Heads
    degree: int
    slots: int
    positions: int
    dtype: str
    scaled: bool = False
    by_position: bool = False

    @cached_property
    def arrays(self) -> list[CacheArray]:
        """The arrays of a layer, in order: [slots * kv_heads, positions, head_dim], with scales [..., 1] last."""
        sizes = self.slots * self.heads.kv_share(self.degree), self.own(self.positions)
        arrays = [CacheArray(name, self.dtype, (*sizes, self.heads.head_dim)) for name in ("keys", "values")]
        scales = [CacheArray(name, "f32", (*sizes, 1)) for name in ("key_scales", "value_scales")]
        return arrays + scales if self.scaled else arrays

    @cached_property
    def spread(self) -> Spread | None:
        """How devices divide the positions, if they do: if each would hold one copy of one key head."""
        copies = self.heads.copies(self.degree)
        divides = self.by_position and copies > 1 and self.heads.kv_heads * copies == self.degree
        return Spread(copies, self.degree) if divides else None

    def own(self, positions: int) -> int:
        """Return how many of the first `positions` a device has, at most."""
        return -(-positions // self.spread.devices) if self.spread else positions

    def declare(self, parameters: hlo.Parameters, layers: int) -> list[Cache]:
        """Declare the caches of this many layers as parameters."""
        return [
            tuple(parameters.add(dtype_named(a.dtype)[a.sizes], f"layer.{layer}.{a.name}") for a in self.arrays)
            for layer in range(layers)
        ]

    def zeros(self, layers: int) -> Iterator[np.ndarray[Any, Any]]:
        """Yield the values of empty caches of this many layers, the same for each device."""
        empty = [np.zeros(a.sizes, element_type(a.dtype).numpy) for a in self.arrays]
        for _ in range(layers):
            yield from empty

    def cut(self, caches: Sequence[Cache], width: int) -> list[Cache]:
        """Cut caches to their first `width` positions."""
        size = self.own(width)
        return [tuple(x if x.sizes[1] == size else hlo.slice(x, 1, 0, size) for x in cache) for cache in caches]

    def by_layer(self, flat: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Group the arrays of several layers by layer."""
        count = len(self.arrays)
        return [tuple(flat[first : first + count]) for first in range(0, len(flat), count)]


def flattened(caches: Sequence[Cache]) -> list[Tensor]:
    return [tensor for cache in caches for tensor in cache]


def in_place(after: list[Tensor], before: list[Tensor]) -> list[Tensor]:
    """Alias each result to the parameter it was made from, and return the results."""
    for result, parameter in zip(after, before, strict=True):
        result.set_alias_to(parameter, must=True)
    return after
