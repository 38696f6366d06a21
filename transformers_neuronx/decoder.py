"""The engine of one model: its programs, one for each bucket, and the weights and caches on the devices.

A program is made of the family's graph when it is first needed or asked for. All share one set of weights and one
cache per layer, which never leaves the devices. This file does not know how tokens are chosen.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import numpy as np

from transformers_neuronx import hlo
from transformers_neuronx.compiler import compile_py_func
from transformers_neuronx.config import CompileOptions
from transformers_neuronx.layers.step import declare_cache, declare_step
from transformers_neuronx.module import Checkpoint
from transformers_neuronx.pyhlo import HloModuleProto, HloScribe, Tensor, dtype_named
from transformers_neuronx.pyhlo.dtypes import element_type
from transformers_neuronx.runtimes.base import DeviceTensor, Executable, Runtime
from transformers_neuronx.weights import Heads, Key, Weight, declare, resolve, shards

Progress = Callable[[str], object]
Array = np.ndarray[Any, Any]


class DecoderConfig(Protocol):
    """What the engine itself reads of a family's configuration."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def n_positions(self) -> int | None: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def n_layer(self) -> int: ...
    @property
    def attention_heads(self) -> Heads: ...


@dataclass(frozen=True)
class Family:
    """A kind of decoder: how its configuration is read, and the modules with its weight table and its graph.

    `weights` has `table(config)`, `ignored(config)` and PREFIX; `graph` has `embed`, `layer` and `head`, and, where
    layers share something that follows from the positions alone, `prepare`. Where layers differ, the configuration
    has `layer_kinds`, and `layer` is told the kind as its last argument.
    """

    read_config: Callable[[Any], DecoderConfig]
    weights: ModuleType
    graph: ModuleType


class Shape(NamedTuple):
    """What a program is compiled for: rows, active tokens of each, positions they may look back to.

    With `every`, it has logits of all active tokens, otherwise of each row's last.
    """

    rows: int
    active: int
    width: int
    every: bool = False


class Piece(NamedTuple):
    """A part of the model that one program runs: layers of these kinds, the embedding before them, the head after."""

    embed: bool
    layers: tuple[str, ...]
    head: bool


def pieces(layers: tuple[str, ...], unroll: int | None) -> list[Piece]:
    """The whole model as one piece, or as groups of `unroll` layers between an embedding and a head."""
    if unroll is None or unroll >= len(layers):
        return [Piece(True, layers, True)]
    groups = [layers[first : first + unroll] for first in range(0, len(layers), unroll)]
    return [Piece(True, (), False), *(Piece(False, group, False) for group in groups), Piece(False, (), True)]


class Decoder:
    """A family's graph and one checkpoint's weights on a runtime."""

    def __init__(self, family: Family, config: DecoderConfig, runtime: Runtime, options: CompileOptions) -> None:
        self.family = family
        self.config = config
        self.runtime = runtime
        self.options = options
        self.dtype = options.amp
        self.slots = options.batch_size
        self.layers = tuple(getattr(config, "layer_kinds", [""] * config.n_layer))
        table: list[Weight] = family.weights.table(config)
        self.shared_table = [row for row in table if not row.layered]
        self.layer_table = [row for row in table if row.layered]
        self.weights: dict[Key, DeviceTensor] = {}
        self.caches: list[DeviceTensor] = []
        self._programs: dict[Shape, list[tuple[Piece, Executable]]] = {}
        self._reorder: Executable | None = None
        self._tainted = False

    # Loading and compiling.

    def load(self, checkpoint: Checkpoint, progress: Progress = lambda done: None) -> None:
        """Bring the checkpoint's weights to the devices, after it has been checked whole. Reports each weight."""
        weights = self.family.weights
        table = [*self.shared_table, *self.layer_table]
        resolved = resolve(table, self.config.n_layer, checkpoint, weights.PREFIX, weights.ignored(self.config))
        for keys, arrays in shards(resolved, checkpoint, self.dtype, self.runtime.device_count):
            tensor = self.runtime.put(arrays)
            for key in keys:
                self.weights[key] = tensor
                progress(key[1])
        self.reset()

    def planned(self) -> list[Shape]:
        """The programs that ordinary use needs: a prompt in every context bucket, a token in every position bucket."""
        buckets = self.options.buckets
        context = [Shape(self.options.prompt_batch_size, n, buckets.width(n)) for n in buckets.context]
        return [*context, *(Shape(self.slots, 1, width) for width in buckets.positions)]

    def compile(self, shapes: Iterable[Shape], progress: Progress = lambda done: None) -> None:
        """Compile the programs that are not there yet, several at a time. Reports each shape."""

        def build(shape: Shape) -> None:
            unroll = self.options.unroll if shape.active == 1 else self.options.context_unroll
            parts = pieces(self.layers, unroll)
            built = {piece: self.runtime.compile(self.module(shape, piece)) for piece in dict.fromkeys(parts)}
            self._programs[shape] = [(piece, built[piece]) for piece in parts]
            progress(f"{shape.active} of {shape.width}")

        missing = [shape for shape in dict.fromkeys(shapes) if shape not in self._programs]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(build, missing))

    def compile_reorder(self) -> Executable:
        """The program of `reorder`, compiled when first asked for."""
        if self._reorder is None:
            self._reorder = self.runtime.compile(self.reorder_module())
        return self._reorder

    # The programs.

    def cache_sizes(self) -> tuple[int, int, int]:
        """One device's cache of keys, or of values, of one layer."""
        kv_heads = self.config.attention_heads.kv_share(self.runtime.device_count)
        return self.slots * kv_heads, self.options.buckets.longest, self.config.attention_heads.head_dim

    def module(self, shape: Shape, piece: Piece) -> HloModuleProto:
        """The program of `piece` for `shape`.

        Parameters: the step; the hidden state, unless the piece embeds; keys and values of each of its layers; its
        weights in the order of the table. Results: logits f32[rows, 1 or active, vocab], or the hidden state; then the
        caches, in the memory of those that came in.
        """
        config, graph, degree = self.config, self.family.graph, self.runtime.device_count

        def program(scribe: HloScribe) -> list[Tensor]:
            parameters = hlo.Parameters()
            step = declare_step(parameters, shape.rows, shape.active, shape.width, own_slots=shape.rows != self.slots)
            if not piece.embed:
                hidden = dtype_named(self.dtype)[shape.rows, shape.active, config.hidden_size]
                x = parameters.add(hidden, "hidden")
            caches = [
                declare_cache(parameters, self.dtype, self.cache_sizes(), f"layer.{layer}.")
                for layer in range(len(piece.layers))
            ]
            if piece.embed or piece.head:
                shared = declare(self.shared_table, parameters, self.dtype, degree)
            if piece.embed:
                with scribe.scope("embed"):
                    x = graph.embed(config, shared, step)
            prepared = [graph.prepare(config, step)] if hasattr(graph, "prepare") else []
            for layer, cache in enumerate(caches):
                weights = declare(self.layer_table, parameters, self.dtype, degree, f"layer.{layer}.")
                with scribe.scope(f"layer.{layer}"):
                    kind = [piece.layers[layer]] if piece.layers[layer] else []
                    x, caches[layer] = graph.layer(config, weights, x, cache, step, *prepared, *kind)
                caches[layer].keys.set_alias_to(cache.keys, must=True)
                caches[layer].values.set_alias_to(cache.values, must=True)
            if piece.head:
                with scribe.scope("head"):
                    x = graph.head(config, shared, x if shape.every else step.last(x))
            return [x, *(tensor for cache in caches for tensor in (cache.keys, cache.values))]

        return compile_py_func(program)

    def reorder_module(self) -> HloModuleProto:
        """The program that gives every slot the cache of the slot named for it. Parameters: s32[slots], the caches."""

        def reorder(scribe: HloScribe) -> list[Tensor]:
            parameters = hlo.Parameters()
            source = parameters.add(dtype_named("s32")[self.slots], "source")
            rows, positions, d = self.cache_sizes()
            outputs = []
            for _ in range(2 * self.config.n_layer):
                cache = parameters.add(dtype_named(self.dtype)[rows, positions, d], "cache")
                by_slot = hlo.take(hlo.reshape(cache, self.slots, -1, positions, d), source)
                outputs.append(hlo.reshape(by_slot, rows, positions, d))
                outputs[-1].set_alias_to(cache, must=True)
            return outputs

        return compile_py_func(reorder)

    # Running.

    def reset(self) -> None:
        """Forget all sequences: caches of zeros."""
        self._tainted = False
        zeros = np.zeros(self.cache_sizes(), element_type(self.dtype).numpy)
        self.caches = [self.runtime.put([zeros]) for _ in range(2 * self.config.n_layer)]

    def run(self, ids: Array, start: Array, length: Array, end: Array, every: bool = False) -> Array:
        """Feed `length[i]` of `ids[i]` to slot `i` from position `start[i]` on; logits of the last one, or of `every`.

        ids s32[b, n] with n a context bucket or 1; a row of length 0 stays as it is. `end[i]` is where the row's
        tokens at hand end, when they are fed in several calls. -> f32[b, 1 or n, vocab]
        """
        rows, active = ids.shape
        width = self.options.buckets.width(max(active, int((start + length).max())))
        shape = Shape(rows, active, width, every and active > 1)
        if shape not in self._programs:
            self.compile([shape])
        packed = np.concatenate([np.stack([np.arange(rows), start, length, end], 1), ids], 1).astype(np.int32)
        if self._tainted and not start.any():
            self.reset()
        try:
            logits = self._run_pieces(shape, packed).numpy()
            # A NaN left in a cache would reach whoever uses the slot next: attention weighs it with zero.
            self._tainted |= not np.isfinite(logits).all()
            return logits
        except BaseException:
            # The caches were given away to a program that did not return them.
            self.reset()
            raise

    def _run_pieces(self, shape: Shape, packed: Array) -> DeviceTensor:
        step = self.runtime.put([packed])
        x: list[DeviceTensor] = []
        first = 0
        for piece, executable in self._programs[shape]:
            caches = slice(2 * first, 2 * (first + len(piece.layers)))
            shared = [self.weights[None, row.name] for row in self.shared_table] if piece.embed or piece.head else []
            layers = range(first, first + len(piece.layers))
            weights = [self.weights[layer, row.name] for layer in layers for row in self.layer_table]
            out, *self.caches[caches] = executable(step, *x, *self.caches[caches], *shared, *weights)
            x = [out]
            first += len(piece.layers)
        return x[0]

    def reorder(self, source: Array) -> None:
        """Slot `i` goes on with the sequence of slot `source[i]`. source s32[slots]"""
        program = self.compile_reorder()
        try:
            self.caches = program(self.runtime.put([source.astype(np.int32)]), *self.caches)
        except BaseException:
            self.reset()
            raise
