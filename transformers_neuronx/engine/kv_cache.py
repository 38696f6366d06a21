"""The arrays of a model's cache on one device: their sizes, their order as parameters, and how devices divide them.

A kind of layer keeps keys and values by position, or states, or both. An array by position has a place for each
position of a sequence, or of a page. A state has one place for a sequence, and each step replaces it. So has what an
encoder has read for a sequence: its memory, which steps only read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from transformers_neuronx import hlo
from transformers_neuronx.layers.state import State
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
class LayerCache:
    """The cache of a kind of layer, on each of `degree` devices, for `positions` of each of `slots` sequences.

    Keys and values of these `heads`, if there are any, have the type `dtype`; if they are `scaled`, each head of a
    position has a scale. Attention reads at most the last `window` positions. With `by_position`, devices that would
    hold copies of a key head divide its positions. Of each of `states`, there are `places`.
    """

    heads: Heads | None
    degree: int
    slots: int
    positions: int
    dtype: str
    scaled: bool = False
    by_position: bool = False
    window: int | None = None
    states: tuple[State, ...] = ()
    places: int = 0

    @cached_property
    def arrays(self) -> list[CacheArray]:
        """The arrays of a layer, in order: [slots * kv_heads, positions, head_dim], scales [..., 1], and states."""
        states = [
            CacheArray(state.name, state.dtype, (self.places, *state.share(self.degree))) for state in self.states
        ]
        return self.kept + states

    @cached_property
    def kept(self) -> list[CacheArray]:
        """The arrays by position."""
        if self.heads is None:
            return []
        sizes = self.slots * self.heads.kv_share(self.degree), self.own(self.positions)
        parts = ["key"] if self.heads.latent else ["key", "value"]
        arrays = [CacheArray(f"{part}s", self.dtype, (*sizes, self.heads.head_dim)) for part in parts]
        scales = [CacheArray(f"{part}_scales", "f32", (*sizes, 1)) for part in parts]
        return arrays + scales if self.scaled else arrays

    @cached_property
    def spread(self) -> Spread | None:
        """How devices divide the positions, if they do: if each would hold one copy of one key head."""
        if self.heads is None or not self.by_position:
            return None
        copies = self.heads.copies(self.degree)
        divides = copies > 1 and self.heads.kv_heads * copies == self.degree
        return Spread(copies, self.degree) if divides else None

    def own(self, positions: int) -> int:
        """Return how many of the first `positions` a device has, at most."""
        return -(-positions // self.spread.devices) if self.spread else positions

    def cut(self, cache: Cache, width: int) -> Cache:
        """Cut a cache to its first `width` positions."""
        size, count = self.own(width), len(self.kept)
        kept = (x if x.sizes[1] == size else hlo.slice(x, 1, 0, size) for x in cache[:count])
        return (*kept, *cache[count:])


@dataclass(frozen=True)
class MemoryLayout:
    """The memory of sources on each device: in each of `places`, for each layer, keys and values of so many positions.

    A device has so many `heads`, of the type `dtype`.
    """

    places: int
    positions: int
    heads: int
    head_dim: int
    dtype: str

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the keys, or values, of a layer."""
        return self.places, self.positions, self.heads, self.head_dim

    def declare(self, parameters: hlo.Parameters, layers: int) -> list[Tensor]:
        """Declare the lengths s32[places], then keys and values of each layer, [places, positions, heads, d]."""
        lengths = parameters.add(dtype_named("s32")[self.places], "memory.lengths")
        sizes = dtype_named(self.dtype)[self.sizes]
        names = [f"memory.{layer}.{name}" for layer in range(layers) for name in ("keys", "values")]
        return [lengths, *(parameters.add(sizes, name) for name in names)]

    def zeros(self, layers: int) -> Iterator[np.ndarray[Any, Any]]:
        """Yield the values of the memory of no source, in the same order."""
        yield np.zeros(self.places, np.int32)
        array = np.zeros(self.sizes, element_type(self.dtype).numpy)
        for _ in range(2 * layers):
            yield array


@dataclass(frozen=True)
class CacheLayout:
    """The caches of a model's layers, given the kind of each layer, and the cache of each kind.

    If an encoder reads sources, sequences have places in their `memory`, too. There are so many `places`.
    """

    layers: tuple[str, ...]
    kinds: Mapping[str, LayerCache]
    memory: MemoryLayout | None = None
    places: int = 0
    pages: str = ""  # "64x128x1", if there are any: their size, their numbers for each window, and the places

    @property
    def of_layers(self) -> list[LayerCache]:
        """The cache of each layer."""
        return [self.kinds[kind] for kind in self.layers]

    @property
    def windows(self) -> list[int | None]:
        """The different windows of attention, each once; None where all positions are read."""
        return list(dict.fromkeys(cache.window for cache in self.kinds.values() if cache.heads))

    @property
    def has_states(self) -> bool:
        return any(cache.states for cache in self.kinds.values())

    @property
    def has_places(self) -> bool:
        """Whether sequences have more than pages."""
        return self.has_states or self.memory is not None

    def paged(self, page: int, counts: Mapping[int | None, int], places: int) -> CacheLayout:
        """Return the layout with pages of `page` positions instead of slots: so many for layers with each window."""

        def paged(cache: LayerCache) -> LayerCache:
            pages = counts[cache.window] if cache.heads else 0
            return replace(cache, slots=pages, positions=page, by_position=False, places=places)

        kinds = {kind: paged(cache) for kind, cache in self.kinds.items()}
        memory = self.memory and replace(self.memory, places=places)
        numbers = [*counts.values(), places]
        return replace(self, kinds=kinds, memory=memory, places=places, pages="x".join(map(str, [page, *numbers])))

    def declare(self, parameters: hlo.Parameters, layers: Sequence[str]) -> list[Cache]:
        """Declare the caches of layers of these kinds as parameters."""
        return [
            tuple(parameters.add(dtype_named(a.dtype)[a.sizes], f"layer.{layer}.{a.name}") for a in self.arrays(kind))
            for layer, kind in enumerate(layers)
        ]

    def arrays(self, kind: str) -> list[CacheArray]:
        """The arrays of a layer of this kind."""
        return self.kinds[kind].arrays

    def zeros(self) -> Iterator[np.ndarray[Any, Any]]:
        """Yield the values of empty caches of all layers, the same for each device."""
        empty = {
            kind: [np.zeros(a.sizes, element_type(a.dtype).numpy) for a in cache.arrays]
            for kind, cache in self.kinds.items()
        }
        for kind in self.layers:
            yield from empty[kind]

    def cut(self, caches: Sequence[Cache], width: int) -> list[Cache]:
        """Cut the caches of all layers to their first `width` positions."""
        return [layer.cut(cache, width) for layer, cache in zip(self.of_layers, caches, strict=True)]

    def by_layer(self, flat: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Group the arrays of all layers by layer."""
        rest = iter(flat)
        return [tuple(next(rest) for _ in cache.arrays) for cache in self.of_layers]

    def span(self, layers: range) -> slice:
        """Return where the arrays of these layers are among those of all."""
        counts = [len(cache.arrays) for cache in self.of_layers]
        return slice(sum(counts[: layers.start]), sum(counts[: layers.stop]))


class Given(NamedTuple):
    """What a request has of the cache from the beginning: tables of pages, and places."""

    tables: list[list[int]]
    places: list[int]


def flattened(caches: Sequence[Cache]) -> list[Tensor]:
    return [tensor for cache in caches for tensor in cache]


def in_place(after: list[Tensor], before: list[Tensor]) -> list[Tensor]:
    """Alias each result to the parameter it was made from, and return the results."""
    for result, parameter in zip(after, before, strict=True):
        result.set_alias_to(parameter, must=True)
    return after
