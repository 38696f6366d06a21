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
    """Encoding sources: rows, and the most tokens of each, or the positions that are made of numbers."""

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
    """Return the row of a source of up to so many tokens, or of 0 if it is numbers."""
    return row_of(place=None, length=None, **({"ids": tokens} if tokens else {}))


class EncoderRows(NamedTuple):
    """The rows of a weight table that encoding reads: outside the layers, of the encoder's layers, of the decoder's."""

    whole: list[Weight]
    encoder: list[Weight]
    to_memory: list[Weight]

    @classmethod
    def of(cls, table: Sequence[Weight], config: EncoderDecoderConfig) -> EncoderRows:
        def named(*prefixes: str, layered: bool = True) -> list[Weight]:
            return [row for row in table if row.layered == layered and row.name.startswith(prefixes)]

        whole = [WHOLE_ENCODER] if config.source_sizes else [WHOLE_ENCODER, "embed"]
        return cls(named(*whole, layered=False), named(ENCODER_LAYER), named(*TO_MEMORY))

    def keys(self, config: EncoderDecoderConfig) -> list[Key]:
        """Return the keys of these weights in the order of the program's parameters."""
        encoder = [(layer, row.name) for layer in range(config.encoder_layers) for row in self.encoder]
        to_memory = [(layer, row.name) for layer in range(config.n_layer) for row in self.to_memory]
        return [*((None, row.name) for row in self.whole), *encoder, *to_memory]


def encode_module(programs: Programs, key: EncodeKey) -> HloModuleProto:
    """Write the program that encodes sources.

    Parameters: a `source_row` for each source, where one of length 0 is none; the sources if they are numbers,
    f32[rows, ...]; the memory; the weights. Results: the memory, in place.
    """
    layout, graph, config = programs.cache.memory, programs.family.encoder, cast(EncoderDecoderConfig, programs.config)
    assert layout is not None and graph is not None
    rows = EncoderRows.of(programs.table, config)

    def program(scribe: HloScribe) -> list[Tensor]:
        parameters = hlo.Parameters()
        row = source_row(0 if config.source_sizes else key.tokens)
        packed = declare_rows(parameters, row, key.rows, "sources")
        places, lengths, *ids = (field(packed, row, name) for name in row.names or ())
        if config.source_sizes:
            numbers = parameters.add(dtype_named("f32")[(key.rows, *config.source_sizes)], "features")
            ids = [hlo.convert(numbers, programs.dtype)]
        before = layout.declare(parameters, config.n_layer)
        w = declare(rows.whole, parameters, programs.dtype, programs.degree)
        # The encoder's layers get the names that the decoder's have.
        named = [replace(each, name=each.name.removeprefix(ENCODER_LAYER)) for each in rows.encoder]
        encoder = _declare_layers(programs, parameters, named, "encoder", config.encoder_layers)
        to_memory = _declare_layers(programs, parameters, rows.to_memory, "cross", config.n_layer)
        with scribe.scope("embed"):
            x, shared = graph.embed_source(config, w, *ids)
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

    def encode(self, sources: Sequence[Array], places: Array) -> None:
        """Encode sources, s32[·] each, or f32[*source_sizes]. From now on these places have them."""
        pack = self._numbers if self._config.source_sizes else self._ids
        for first in range(0, len(sources), self._rows):
            key, *packed = pack(sources[first : first + self._rows], places[first:])
            [(_, program)] = self._store.parts(key)
            operands = [self._runtime.put([each]) for each in packed]
            self.arrays = program(*operands, *self.arrays, *self._encoder_operands())
        self.sources[places] = self._read + np.arange(len(places))
        self._read += len(places)

    @property
    def _config(self) -> EncoderDecoderConfig:
        return cast(EncoderDecoderConfig, self._store.programs.config)

    def _ids(self, group: Sequence[Array], places: Array) -> tuple[EncodeKey, Array]:
        """Return the program for sources of ids, and its rows."""
        longest = max(map(len, group))
        key = next(key for key in self.keys() if key.tokens >= longest)
        packed = np.zeros(key.rows, source_row(key.tokens))
        for row, ids, place in zip(packed, group, places, strict=False):
            row["place"], row["length"], row["ids"][: len(ids)] = place, len(ids), ids
        return key, words(packed)

    def _numbers(self, group: Sequence[Array], places: Array) -> tuple[EncodeKey, Array, Array]:
        """Return the program for sources of numbers, its rows, and the numbers."""
        [key], count = self.keys(), len(group)
        packed = np.zeros(key.rows, source_row(0))
        numbers = np.zeros((key.rows, *self._config.source_sizes), np.float32)
        packed["place"][:count], packed["length"][:count], numbers[:count] = places[:count], key.tokens, group
        return key, words(packed), numbers

    def _encoder_operands(self) -> list[DeviceTensor]:
        keys = EncoderRows.of(self._store.programs.table, self._config).keys(self._config)
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
