"""Low-rank adapters on the devices: the arrays of all places, and the program that puts one adapter into a place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from transformers_neuronx import hlo
from transformers_neuronx.compiler import compile_py_func
from transformers_neuronx.engine.keys import ProgramKey, Segment
from transformers_neuronx.engine.kv_cache import in_place
from transformers_neuronx.engine.loading import on_host
from transformers_neuronx.engine.programs import Programs
from transformers_neuronx.engine.store import ProgramStore
from transformers_neuronx.layers.storage import put_rows
from transformers_neuronx.pyhlo import HloModuleProto, HloScribe, Tensor, dtype_named
from transformers_neuronx.pyhlo.dtypes import element_type
from transformers_neuronx.runtimes.base import DeviceTensor, Runtime
from transformers_neuronx.weights.reading import Key
from transformers_neuronx.weights.rows import Weight


@dataclass(frozen=True)
class PlaceKey(ProgramKey):
    """Putting an adapter into its place."""

    kind = "place"

    def written(self, programs: Programs, segment: Segment) -> HloModuleProto:
        return place_module(programs)


def rows_of(programs: Programs) -> Iterator[tuple[Key, Weight]]:
    """Iterate over the arrays of adapters, in the order of a program's parameters."""
    if programs.adapters:
        for layer in range(len(programs.layers)):
            for row in programs.adapters.of_layer(layer, programs.layers):
                yield (layer, row.name), row


def place_module(programs: Programs) -> HloModuleProto:
    """Write the program that puts an adapter into a place.

    Parameters: the place, s32[]; what the adapter has in each array, [rank, ·]; the arrays, [places * rank, ·].
    Results: the arrays, in place.
    """
    assert programs.adapters is not None
    rank, rows = programs.adapters.rank, [row for _, row in rows_of(programs)]

    def program(scribe: HloScribe) -> list[Tensor]:
        parameters, dtype = hlo.Parameters(), dtype_named(programs.dtype)
        place = parameters.add(dtype_named("s32")[[]], "place")
        shapes = [row.share(programs.degree) for row in rows]
        own = [parameters.add(dtype[rank, size], "adapter") for _, size in shapes]
        arrays = [parameters.add(dtype[shape], "adapters") for shape in shapes]
        return in_place([put_rows(*both, place * rank) for both in zip(arrays, own, strict=True)], arrays)

    return compile_py_func(program)


class DeviceAdapters:
    """The adapters that are on the devices, for the programs of a store; `reset` makes their places."""

    def __init__(self, runtime: Runtime, store: ProgramStore) -> None:
        self._runtime, self._store = runtime, store
        self.arrays: list[DeviceTensor] = []

    def keys(self) -> list[ProgramKey]:
        """The programs that `load` needs."""
        return [PlaceKey()] * bool(self._store.programs.adapters)

    def reset(self) -> None:
        """Fill all places with zeros."""
        programs, dtype = self._store.programs, element_type(self._store.programs.dtype).numpy
        shapes = (row.share(programs.degree) for _, row in rows_of(programs))
        self.arrays = [self._runtime.put([np.zeros(shape, dtype)]) for shape in shapes]

    def load(self, place: int, content: Mapping[Key, torch.Tensor]) -> None:
        """Put an adapter into a place: what it has in its layers, [rank, ·] each, and zeros elsewhere."""
        [(_, program)] = self._store.parts(PlaceKey())
        own = [self._put(row, content.get(key)) for key, row in rows_of(self._store.programs)]
        self.arrays = program(self._runtime.put([np.array(place, np.int32)]), *own, *self.arrays)

    def _put(self, row: Weight, content: torch.Tensor | None) -> DeviceTensor:
        programs, runtime = self._store.programs, self._runtime
        assert programs.adapters is not None
        whole = torch.zeros(programs.adapters.rank, row.shape[1]) if content is None else content
        pieces = row.split.cut(whole, programs.degree, runtime.here) if row.split else [whole]
        return runtime.put([on_host(runtime, piece, programs.dtype) for piece in pieces], donate=True)
