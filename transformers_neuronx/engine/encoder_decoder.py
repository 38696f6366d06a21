"""Models whose decoder attends to a source that an encoder has read.

The encoder's program computes the memory once per source: the keys and values that each layer of the decoder attends
to. The memory stays on the devices, with one slot per sequence like the caches. Steps only read it, like weights.
All else is the same as for models without an encoder.

A family's graph has `embed`, `layer`, which gets the `w.memory` of all slots, and `head`. It also has `embed_source`,
which additionally returns what all layers of the encoder share, `encoder_layer`, `encoded`, and `memory` for one layer
of the decoder. Names in its weight table that begin with one of ENCODER_ONLY belong to the encoder's programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from transformers_neuronx import hlo
from transformers_neuronx.compiler import compile_py_func
from transformers_neuronx.config import CompileOptions
from transformers_neuronx.engine.decoder import Array, MemoryUse
from transformers_neuronx.engine.family import DecoderConfig, Family
from transformers_neuronx.engine.keys import ProgramKey, Segment
from transformers_neuronx.engine.kv_cache import in_place
from transformers_neuronx.engine.programs import Programs
from transformers_neuronx.engine.slots import SlotDecoder
from transformers_neuronx.errors import InputError
from transformers_neuronx.layers import Memory
from transformers_neuronx.layers.rows import Row, declare_rows, field, row_of, words
from transformers_neuronx.pyhlo import HloModuleProto, HloScribe, Tensor, dtype_named
from transformers_neuronx.pyhlo.dtypes import element_type
from transformers_neuronx.runtimes.base import DeviceTensor, Executable, Runtime
from transformers_neuronx.weights.parameters import declare
from transformers_neuronx.weights.rows import Weight

# Name prefixes: the encoder outside its layers, its layers, and each decoder layer's projections to its memory.
WHOLE_ENCODER, ENCODER_LAYER, TO_MEMORY = "source.", "encoder.", ("cross.k.", "cross.v.")
ENCODER_ONLY = (WHOLE_ENCODER, ENCODER_LAYER, *TO_MEMORY)


class EncoderDecoderConfig(DecoderConfig, Protocol):
    """Attributes of such a family's configuration that the engine itself reads."""

    @property
    def encoder_layers(self) -> int: ...
    @property
    def decoder_start_token_id(self) -> int: ...


@dataclass(frozen=True)
class EncodeKey(ProgramKey):
    """Encoding sources: rows, and the most tokens of each."""

    kind = "encode"
    rows: int
    tokens: int


@dataclass(frozen=True)
class RedirectKey(ProgramKey):
    """Changing which source a slot attends to."""

    kind = "redirect"


def source_row(tokens: int) -> Row:
    """Return the row of a source of up to so many tokens."""
    return row_of(slot=None, length=None, ids=tokens)


class EncoderDecoderPrograms(Programs):
    """Writes the HLO modules of a model with an encoder."""

    config: EncoderDecoderConfig
    reads_sources = True

    def __init__(self, *model: Any, **options: Any) -> None:
        super().__init__(*model, **options)
        layers = self.config.encoder_layers
        self.table = [replace(row, layers=layers) if row.name.startswith(ENCODER_LAYER) else row for row in self.table]
        encoder = [row for row in self.table if row.name.startswith(ENCODER_ONLY)]
        self.source_table = [row for row in self.shared_table if row in encoder or row.name.startswith("embed")]
        self.encoder_table = [row for row in encoder if row.name.startswith(ENCODER_LAYER)]
        self.memory_table = [row for row in encoder if row.name.startswith(TO_MEMORY)]
        self.shared_table, self.layer_table = (
            [row for row in rows if not row.name.startswith(ENCODER_ONLY)]
            for rows in (self.shared_table, self.layer_table)
        )

    @property
    def sources(self) -> int:
        """Number of sources that the memory has places for."""
        return self.cache.places

    def empty_memory(self) -> list[Array]:
        """Return the memory of no source, on one device."""
        array = np.zeros(self.memory_sizes, element_type(self.dtype).numpy)
        return [np.zeros(self.sources, np.int32), *[array] * 2 * len(self.layers)]

    @property
    def memory_sizes(self) -> tuple[int, ...]:
        """Sizes of one layer's keys, or values, on one device."""
        heads = self.config.attention_heads
        return self.sources, self.options.buckets.sources[-1], heads.kv_share(self.degree), heads.head_dim

    def module(self, key: ProgramKey, segment: Segment) -> HloModuleProto:
        match key:
            case EncodeKey():
                return self.encode(key)
            case RedirectKey():
                return self.redirect()
        return super().module(key, segment)

    def encode(self, key: EncodeKey) -> HloModuleProto:
        """Write the program that encodes sources.

        Parameters: a `source_row` for each source, where one of length 0 is none; the memory; the weights. Results:
        the memory, in place.
        """

        def program(scribe: HloScribe) -> list[Tensor]:
            parameters = hlo.Parameters()
            row = source_row(key.tokens)
            packed = declare_rows(parameters, row, key.rows, "sources")
            slots, lengths, ids = (field(packed, row, name) for name in ("slot", "length", "ids"))
            before = self.declare_memory(parameters, len(self.layers))
            w = declare(self.source_table, parameters, self.dtype, self.degree)
            tables = (self.encoder_table, self.config.encoder_layers), (self.memory_table, len(self.layers))
            encoder, to_memory = (self._declare_layers(parameters, *table) for table in tables)
            with scribe.scope("embed"):
                x, shared = self.graph.embed_source(self.config, w, ids)
            for number, weights in enumerate(encoder):
                with scribe.scope(f"encoder.{number}"):
                    x = self.graph.encoder_layer(self.config, weights, x, lengths, shared)
            x = self.graph.encoded(self.config, w, x)
            after = [written(before[0], lengths, slots, lengths)]
            for number, weights in enumerate(to_memory):
                with scribe.scope(f"layer.{number}"):
                    keys, values, _ = self.graph.memory(self.config, weights, x, lengths)
                    for old, new in zip(before[1 + 2 * number :], (keys, values), strict=False):
                        after.append(written(old, only_real(new, lengths), slots, lengths))
            return in_place(after, before)

        return compile_py_func(program)

    def _declare_layers(self, parameters: hlo.Parameters, table: Sequence[Weight], count: int) -> list[Any]:
        """Declare the layers of `table`. The encoder's get the names that a decoder layer's weights have."""
        named = [replace(row, name=row.name.removeprefix(ENCODER_LAYER)) for row in table]
        scope = f"{table[0].name.partition('.')[0]}."
        return [declare(named, parameters, self.dtype, self.degree, f"{scope}{layer}.") for layer in range(count)]

    def redirect(self) -> HloModuleProto:
        """Write the program that gives each slot the memory of its source slot.

        Parameters: s32[slots], the memory. Results: the memory, in place.
        """

        def program(scribe: HloScribe) -> list[Tensor]:
            parameters = hlo.Parameters()
            source = parameters.add(dtype_named("s32")[self.slots], "source")
            memory = self.declare_memory(parameters, len(self.layers))
            return in_place([hlo.take(each, source) for each in memory], memory)

        return compile_py_func(program)

    def declare_memory(self, parameters: hlo.Parameters, layers: int) -> list[Tensor]:
        """Declare the lengths s32[sources], then keys and values of each layer, [sources, positions, kv_heads, d]."""
        lengths = parameters.add(dtype_named("s32")[self.sources], "memory.lengths")
        sizes = dtype_named(self.dtype)[self.memory_sizes]
        names = [f"memory.{layer}.{name}" for layer in range(layers) for name in ("keys", "values")]
        return [lengths, *(parameters.add(sizes, name) for name in names)]

    def declare_weights(self, parameters: hlo.Parameters, segment: Segment) -> tuple[Any, list[Any]]:
        """Declare the weights, and after them the memory if the segment has layers, which attend to it."""
        shared, layers = super().declare_weights(parameters, segment)
        if layers:
            lengths, *arrays = self.declare_memory(parameters, len(layers))
            for weights, keys, values in zip(layers, arrays[::2], arrays[1::2], strict=True):
                weights.memory = Memory(keys, values, lengths)
        return shared, layers


def only_real(x: Tensor, lengths: Tensor) -> Tensor:
    """Set x [b, n, ...] to zero from lengths s32[b] on: attention also multiplies masked positions, by zero."""
    b, n, *rest = x.sizes
    position = hlo.iota("s32", [b, n, *(1 for _ in rest)], 1)
    return hlo.select(position < hlo.reshape(lengths, b, 1, *(1 for _ in rest)), x, 0.0)


def written(memory: Tensor, new: Tensor, slots: Tensor, lengths: Tensor) -> Tensor:
    """Write new [b, ...], padded with zeros, to slots s32[b] of memory [slots, ...] for rows of length above 0."""
    for axis in range(1, len(memory.sizes)):
        new = hlo.pad(new, axis, 0, memory.sizes[axis] - new.sizes[axis])
    zero = hlo.constant(0, "s32")
    for row in range(new.sizes[0]):
        slot, length = (hlo.reshape(hlo.slice(each, 0, row, row + 1)) for each in (slots, lengths))
        where = [slot, *(zero for _ in memory.sizes[1:])]
        old = hlo.dynamic_slice(memory, where, [1, *memory.sizes[1:]])
        memory = hlo.dynamic_update_slice(memory, hlo.select(length > 0, hlo.slice(new, 0, row, row + 1), old), where)
    return memory


class EncoderDecoder(SlotDecoder):
    """The engine of a model with an encoder: that of a decoder, and the memory on the devices.

    `sources` has a number for each slot that identifies its source, or -1 if it has none.
    """

    programs_of = EncoderDecoderPrograms
    programs: EncoderDecoderPrograms

    def __init__(self, family: Family, config: DecoderConfig, runtime: Runtime, options: CompileOptions) -> None:
        super().__init__(family, config, runtime, options)
        self.memory: list[DeviceTensor] = []
        self.sources = np.full(self.slots, -1)
        self._read = 0  # sources read so far

    def planned(self) -> list[ProgramKey]:
        """Return the decoder's keys, the encoder for each source size, and the redirection of slots."""
        encoders = [EncodeKey(self.options.prompt_batch_size, size) for size in self.options.buckets.sources]
        return [*encoders, *super().planned(), RedirectKey()]

    def reset(self) -> None:
        super().reset()
        self.memory = [self.runtime.put([each]) for each in self.programs.empty_memory()]
        self.sources[:] = -1

    def encode(self, tokens: Sequence[Array], slots: Array) -> None:
        """Encode sources, s32[·] each. From now on these slots attend to them."""
        rows = self.options.prompt_batch_size
        for first in range(0, len(tokens), rows):
            group = tokens[first : first + rows]
            key = self.encoder(rows, max(map(len, group)))
            [(_, program)] = self.store.parts(key)
            with self.guarded():
                self.memory = self.encoded(program, key, group, slots[first:].tolist(), self.memory)
        self.sources[slots] = self._read + np.arange(len(slots))
        self._read += len(slots)

    def encoder(self, rows: int, tokens: int) -> EncodeKey:
        """Return the key of the smallest encoder for sources of up to so many tokens."""
        return EncodeKey(rows, next(size for size in self.options.buckets.sources if size >= tokens))

    def encoded(
        self,
        program: Executable,
        key: EncodeKey,
        tokens: Sequence[Array],
        places: Sequence[int],
        memory: list[DeviceTensor],
    ) -> list[DeviceTensor]:
        """Encode sources, s32[·] each, with the program of a key. Return the memory with them at these places."""
        packed = np.zeros(key.rows, source_row(key.tokens))
        for row, ids, place in zip(packed, tokens, places, strict=False):
            row["slot"], row["length"], row["ids"][: len(ids)] = place, len(ids), ids
        return program(self.runtime.put([words(packed)]), *memory, *self._encoder_operands())

    @property
    def memory_use(self) -> MemoryUse:
        held = super().memory_use
        return held._replace(caches=held.caches + sum(array.nbytes for array in self.memory))

    def _encoder_operands(self) -> list[DeviceTensor]:
        programs, config = self.programs, self.programs.config
        layers = range(config.encoder_layers), range(config.n_layer)
        shared = [self.weights[None, row.name] for row in programs.source_table]
        encoder = [self.weights[layer, row.name] for layer in layers[0] for row in programs.encoder_table]
        return [*shared, *encoder, *(self.weights[n, row.name] for n in layers[1] for row in programs.memory_table)]

    def operands(
        self, layers: range, shared: bool = True, memory: Sequence[DeviceTensor] | None = None
    ) -> list[DeviceTensor]:
        """Return the weights, and after them the memory of these layers: this one, by default the decoder's own."""
        lengths, *arrays = self.memory if memory is None else memory
        own = arrays[2 * layers.start : 2 * layers.stop]
        return [*super().operands(layers, shared), *[lengths] * bool(layers), *own]

    def fill(self, slots: Array, start: Array, length: Array) -> None:
        active = slots[length > 0]
        if (self.sources[active] < 0).any():
            raise InputError(f"slots {active[self.sources[active] < 0].tolist()} have no source: call encode() first")
        super().fill(slots, start, length)

    def reorder(self, source: Array) -> None:
        """Reorder the caches and the sources. Where `source` is negative, a slot keeps its source."""
        super().reorder(source)
        self.redirect(np.where(source < 0, np.arange(self.slots), source))

    def redirect(self, source: Array) -> None:
        """Let slot `i` attend to the source of slot `source[i]` from now on. s32[slots]"""
        if (self.sources[source] != self.sources).any():
            [(_, program)] = self.store.parts(RedirectKey())
            with self.guarded():
                self.memory = program(self.runtime.put([source.astype(np.int32)]), *self.memory)
            self.sources = self.sources[source]
