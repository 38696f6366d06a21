"""Models whose sequences attend to a source that an encoder has read.

The encoder's program computes the memory once per source: the keys and values that each layer of the decoder attends
to. The memory stays on the devices, with a place for each sequence. Steps only read it, like weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import numpy as np

from transformers_neuronx import hlo
from transformers_neuronx.compiler import compile_py_func
from transformers_neuronx.engine.family import ENCODER_LAYER, TO_MEMORY, WHOLE_ENCODER, EncoderDecoderConfig
from transformers_neuronx.engine.keys import ProgramKey, Segment
from transformers_neuronx.engine.kv_cache import in_place
from transformers_neuronx.engine.programs import Programs
from transformers_neuronx.engine.store import ProgramStore
from transformers_neuronx.errors import InputError
from transformers_neuronx.layers.rows import Row, declare_rows, field, row_of, words
from transformers_neuronx.layers.storage import put_rows
from transformers_neuronx.pyhlo import HloModuleProto, HloScribe, Tensor, dtype_named
from transformers_neuronx.runtimes.base import DeviceTensor, Runtime
from transformers_neuronx.weights.parameters import declare
from transformers_neuronx.weights.reading import Key
from transformers_neuronx.weights.rows import Weight

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class EncodeKey(ProgramKey):
    """Encoding sources: rows, and the most tokens of each."""

    kind = "encode"
    rows: int
    tokens: int

    def written(self, programs: Programs, segment: Segment) -> HloModuleProto:
        return encode_module(programs, self)


@dataclass(frozen=True)
class RedirectKey(ProgramKey):
    """Changing which source a place has."""

    kind = "redirect"

    def written(self, programs: Programs, segment: Segment) -> HloModuleProto:
        return redirect_module(programs)


def source_row(tokens: int) -> Row:
    """Return the row of a source of up to so many tokens."""
    return row_of(place=None, length=None, ids=tokens)


class EncoderRows(NamedTuple):
    """The rows of a weight table that encoding reads: outside the layers, of the encoder's layers, of the decoder's."""

    whole: list[Weight]
    encoder: list[Weight]
    to_memory: list[Weight]

    @classmethod
    def of(cls, table: Sequence[Weight]) -> EncoderRows:
        def named(*prefixes: str, layered: bool = True) -> list[Weight]:
            return [row for row in table if row.layered == layered and row.name.startswith(prefixes)]

        return cls(named(WHOLE_ENCODER, "embed", layered=False), named(ENCODER_LAYER), named(*TO_MEMORY))

    def keys(self, config: EncoderDecoderConfig) -> list[Key]:
        """Return the keys of these weights in the order of the program's parameters."""
        encoder = [(layer, row.name) for layer in range(config.encoder_layers) for row in self.encoder]
        to_memory = [(layer, row.name) for layer in range(config.n_layer) for row in self.to_memory]
        return [*((None, row.name) for row in self.whole), *encoder, *to_memory]


def encode_module(programs: Programs, key: EncodeKey) -> HloModuleProto:
    """Write the program that encodes sources.

    Parameters: a `source_row` for each source, where one of length 0 is none; the memory; the weights. Results: the
    memory, in place.
    """
    layout, graph, config = programs.cache.memory, programs.family.encoder, cast(EncoderDecoderConfig, programs.config)
    assert layout is not None and graph is not None
    rows = EncoderRows.of(programs.table)

    def program(scribe: HloScribe) -> list[Tensor]:
        parameters = hlo.Parameters()
        row = source_row(key.tokens)
        packed = declare_rows(parameters, row, key.rows, "sources")
        places, lengths, ids = (field(packed, row, name) for name in ("place", "length", "ids"))
        before = layout.declare(parameters, config.n_layer)
        w = declare(rows.whole, parameters, programs.dtype, programs.degree)
        # The encoder's layers get the names that the decoder's have.
        named = [replace(each, name=each.name.removeprefix(ENCODER_LAYER)) for each in rows.encoder]
        encoder = _declare_layers(programs, parameters, named, "encoder", config.encoder_layers)
        to_memory = _declare_layers(programs, parameters, rows.to_memory, "cross", config.n_layer)
        with scribe.scope("embed"):
            x, shared = graph.embed_source(config, w, ids)
        for number, weights in enumerate(encoder):
            with scribe.scope(f"encoder.{number}"):
                x = graph.encoder_layer(config, weights, x, lengths, shared)
        x = graph.encoded(config, w, x)
        after = [_written(before[0], lengths, places, lengths)]
        for number, weights in enumerate(to_memory):
            with scribe.scope(f"layer.{number}"):
                made = graph.memory(config, weights, x, lengths)
                for old, new in zip(before[1 + 2 * number :], (made.keys, made.values), strict=False):
                    after.append(_written(old, _only_real(new, lengths), places, lengths))
        return in_place(after, before)

    return compile_py_func(program)


def _declare_layers(
    programs: Programs, parameters: hlo.Parameters, table: Sequence[Weight], scope: str, count: int
) -> list[Any]:
    scopes = [f"{scope}.{layer}." for layer in range(count)]
    return [declare(table, parameters, programs.dtype, programs.degree, each) for each in scopes]


def _only_real(x: Tensor, lengths: Tensor) -> Tensor:
    """Set x [b, n, ...] to zero from lengths s32[b] on: attention also multiplies masked positions, by zero."""
    b, n, *rest = x.sizes
    position = hlo.iota("s32", [b, n, *(1 for _ in rest)], 1)
    return hlo.select(position < hlo.reshape(lengths, b, 1, *(1 for _ in rest)), x, 0.0)


def _written(memory: Tensor, new: Tensor, places: Tensor, lengths: Tensor) -> Tensor:
    """Write new [b, ...], padded with zeros, to places s32[b] of memory [places, ...] for rows of length above 0."""
    for axis in range(1, len(memory.sizes)):
        new = hlo.pad(new, axis, 0, memory.sizes[axis] - new.sizes[axis])
    zero = hlo.constant(0, "s32")
    for row in range(new.sizes[0]):
        place, length = (hlo.reshape(hlo.slice(each, 0, row, row + 1)) for each in (places, lengths))
        old = hlo.dynamic_slice(memory, [place, *(zero for _ in memory.sizes[1:])], [1, *memory.sizes[1:]])
        memory = put_rows(memory, hlo.select(length > 0, hlo.slice(new, 0, row, row + 1), old), place)
    return memory


def redirect_module(programs: Programs) -> HloModuleProto:
    """Write the program that gives each place the memory of its source place.

    Parameters: s32[places], the memory. Results: the memory, in place.
    """
    layout = programs.cache.memory
    assert layout is not None

    def program(scribe: HloScribe) -> list[Tensor]:
        parameters = hlo.Parameters()
        source = parameters.add(dtype_named("s32")[layout.places], "source")
        memory = layout.declare(parameters, len(programs.layers))
        return in_place([hlo.take(each, source) for each in memory], memory)

    return compile_py_func(program)


class SourceMemory:
    """The memory of a model's sources on the devices, in the places of a cache that `store` has the programs for.

    Its program encodes up to `rows` sources. A model without an encoder has none. `sources` has a number for each place
    that identifies its source, or -1 if it has none.
    """

    def __init__(self, runtime: Runtime, store: ProgramStore, weights: Mapping[Key, DeviceTensor], rows: int) -> None:
        self._runtime, self._store, self._weights, self._rows = runtime, store, weights, rows
        self.layout = store.programs.cache.memory
        self.arrays: list[DeviceTensor] = []
        self.sources = np.full(self.layout.places if self.layout else 0, -1)
        self._read = 0  # sources read so far

    def keys(self) -> list[EncodeKey]:
        """Return the keys of the encoders, one for each source size."""
        sizes = self._store.programs.options.buckets.sources if self.layout else ()
        return [EncodeKey(self._rows, size) for size in sizes]

    @property
    def nbytes(self) -> int:
        """Bytes on all devices."""
        return sum(array.nbytes for array in self.arrays)

    def reset(self) -> None:
        """Forget all sources."""
        if self.layout:
            zeros = self.layout.zeros(len(self._store.programs.layers))
            self.arrays = [self._runtime.put([each]) for each in zeros]
            self.sources[:] = -1

    def encode(self, tokens: Sequence[Array], places: Array) -> None:
        """Encode sources, s32[·] each. From now on these places have them."""
        for first in range(0, len(tokens), self._rows):
            group = tokens[first : first + self._rows]
            longest = max(map(len, group))
            key = next(key for key in self.keys() if key.tokens >= longest)
            packed = np.zeros(key.rows, source_row(key.tokens))
            for row, ids, place in zip(packed, group, places[first:], strict=False):
                row["place"], row["length"], row["ids"][: len(ids)] = place, len(ids), ids
            [(_, program)] = self._store.parts(key)
            self.arrays = program(self._runtime.put([words(packed)]), *self.arrays, *self._encoder_operands())
        self.sources[places] = self._read + np.arange(len(places))
        self._read += len(places)

    def _encoder_operands(self) -> list[DeviceTensor]:
        programs = self._store.programs
        keys = EncoderRows.of(programs.table).keys(cast(EncoderDecoderConfig, programs.config))
        return [self._weights[key] for key in keys]

    def check(self, slots: Array) -> None:
        """Raise InputError if one of these slots, which are places, has no source."""
        if self.layout and (missing := slots[self.sources[slots] < 0]).size:
            raise InputError(f"slots {missing.tolist()} have no source: call encode() first")

    def redirect(self, source: Array) -> None:
        """Let place `i` have the source of place `source[i]` from now on. s32[places]"""
        if self.layout and (self.sources[source] != self.sources).any():
            [(_, program)] = self._store.parts(RedirectKey())
            self.arrays = program(self._runtime.put([source.astype(np.int32)]), *self.arrays)
            self.sources = self.sources[source]

    def operands(self, layers: range) -> list[DeviceTensor]:
        """Return the memory of these layers, in the order of a program's parameters."""
        if not self.layout or not layers:
            return []
        lengths, *arrays = self.arrays
        return [lengths, *arrays[2 * layers.start : 2 * layers.stop]]
