"""The engine of one model: its programs, one for each bucket, and the weights and caches on the devices.

A program is built when it is first needed or asked for. All share one set of weights and one cache per layer, which
never leaves the devices. This file does not know how tokens are chosen, nor what a graph is made of.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from time import perf_counter
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from transformers_neuronx.cache import Saved, build
from transformers_neuronx.compiler import identity
from transformers_neuronx.config import CompileOptions
from transformers_neuronx.layers.choice import BROKEN, NOTHING
from transformers_neuronx.loops import EOS, POLICY
from transformers_neuronx.module import Checkpoint
from transformers_neuronx.programs import (
    Choice,
    DecoderConfig,
    Family,
    Layerwise,
    Loop,
    Piece,
    Programs,
    Reorder,
    Shape,
    Verify,
    What,
)
from transformers_neuronx.pyhlo import HloModuleProto
from transformers_neuronx.pyhlo.dtypes import element_type, numpy_to_torch, to_torch, torch_to_numpy
from transformers_neuronx.runtimes.base import DeviceTensor, Executable, Runtime
from transformers_neuronx.weights import Key, Sharded, resolve, shards

Progress = Callable[[str], object]
Array = np.ndarray[Any, Any]
Built = list[tuple[Piece, Executable]]

LOADERS = 2  # weights on their way to the devices at once


class Held(NamedTuple):
    """Bytes on all devices: weights, caches, and what the largest program needs besides."""

    weights: int
    caches: int
    temporaries: int


class Decoder:
    """A family's graph and one checkpoint's weights on a runtime."""

    programs_of: ClassVar[type[Programs]] = Programs

    def __init__(self, family: Family, config: DecoderConfig, runtime: Runtime, options: CompileOptions) -> None:
        self.family = family
        self.config = config
        self.runtime = runtime
        self.options = options
        self.slots = options.batch_size
        self.programs = self.programs_of(family, config, options, runtime.device_count, runtime.panels)
        cached = self.programs.cache_arrays[0]
        self.programs.in_place = runtime.attends_in_place(cached.dtype, cached.sizes[2])
        self.weights: dict[Key, DeviceTensor] = {}
        self.caches: list[DeviceTensor] = []
        self.saved: Saved | None = None  # the programs of an artifact
        self.executables: dict[str, tuple[HloModuleProto, Executable]] = {}  # by the identity of the module
        self.asked: dict[str, str] = {}  # the identity of the module for a program, which the artifact will know by it
        self._built: dict[What, Built] = {}
        self.tainted = np.zeros(self.slots, bool)  # slots whose caches may hold NaN
        self.load_seconds = self.compile_seconds = 0.0

    # Loading and compiling.

    def read(self, checkpoint: Checkpoint) -> Iterator[Sharded]:
        """The checkpoint's weights for the devices, after it has been checked whole."""
        weights, table = self.family.weights, self.programs.table
        resolved = resolve(table, self.config.n_layer, checkpoint, weights.PREFIX, weights.ignored(self.config))
        return shards(resolved, checkpoint, self.options.amp, self.runtime.device_count)

    def take(self, weights: Iterable[Sharded], progress: Progress = lambda done: None) -> None:
        """Bring weights to the devices, LOADERS at a time: no more are in memory besides. Reports each weight."""

        def on_host(piece: torch.Tensor, element: str) -> Array:
            # Most lie in a file, of which pages are read when they are used.
            if piece.dtype == to_torch(element) and piece.is_contiguous():
                array = torch_to_numpy(piece)
                if self.runtime.usable(array):
                    return array
            array = self.runtime.empty(piece.shape, element_type(element).numpy)
            numpy_to_torch(array).copy_(piece)
            return array

        def put(weight: Sharded) -> DeviceTensor:
            return self.runtime.put([on_host(piece, weight.element) for piece in weight.pieces()], given=True)

        weights, began = list(weights), perf_counter()
        with ThreadPoolExecutor(LOADERS) as pool:
            for weight, tensor in zip(weights, pool.map(put, weights), strict=True):
                for key in weight.keys:
                    self.weights[key] = tensor
                    progress(key[1])
        self.load_seconds += perf_counter() - began
        self.reset()

    def planned(self) -> list[What]:
        """The programs that ordinary use needs: a prompt in every context bucket, in every position bucket one token
        and the loop over tokens, and the choice of the first one.
        """
        options, buckets = self.options, self.options.buckets
        context = [Shape(options.prompt_batch_size, n, buckets.width(n)) for n in buckets.context]
        tokens = [Shape(self.slots, 1, width) for width in buckets.positions]
        loops = [Loop(width, options.chunk) for width in buckets.positions] if self.loops else []
        return [*context, *tokens, *loops, Choice(self.slots)]

    @property
    def loops(self) -> bool:
        """Whether tokens are made in a loop on the devices."""
        return self.options.chunk > 0 and self.options.unroll is None and self.runtime.loops

    def compile(
        self,
        wanted: Iterable[What],
        progress: Progress = lambda done: None,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> None:
        """Compile the programs that are not there yet, several at a time, and do something else `meanwhile`.

        Reports each.
        """

        def build_all(what: What) -> None:
            parts = self.programs.pieces(what)
            built = {}
            for piece in dict.fromkeys(parts):
                asked = f"{what} {tuple(piece)}"
                module = self.saved.module(asked) if self.saved else None
                if module is None:
                    module = self.programs.module(what, piece)
                    module.name = title(what, piece)
                built[piece] = self.build(module, asked)
            self._built[what] = [(piece, built[piece]) for piece in parts]
            finished.append(perf_counter())
            progress(str(what))

        missing = [what for what in dict.fromkeys(wanted) if what not in self._built]
        finished = [began := perf_counter()]
        with ThreadPoolExecutor(self.options.workers or os.cpu_count()) as pool:
            building = [pool.submit(build_all, what) for what in missing]
            try:
                meanwhile()
                for program in building:
                    program.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self.runtime.stop()
                raise
        self.compile_seconds += max(finished) - began

    def build(self, module: HloModuleProto, asked: str = "") -> Executable:
        """An executable of `module` for the devices, from wherever there is one, or compiled.

        `asked` says for what the module was written, if nothing but that and the model decides what it is.
        """
        name = identity(module)
        executable = build(self.runtime, module, name, self.saved)
        self.executables[name] = module, executable
        if asked:
            self.asked[asked] = name
        return executable

    def _parts(self, what: What) -> Built:
        if what not in self._built:
            self.compile([what])
        return self._built[what]

    # Running.

    def reset(self) -> None:
        """Forget all sequences: caches of zeros."""
        self.tainted[:] = False
        layer = [np.zeros(a.sizes, element_type(a.dtype).numpy) for a in self.programs.cache_arrays]
        self.caches = [self.runtime.put([zeros]) for _ in range(self.config.n_layer) for zeros in layer]

    def run(
        self, ids: Array, start: Array, length: Array, end: Array, slots: Array | None = None, every: bool = False
    ) -> Array:
        """Feed `length[i]` of `ids[i]` from position `start[i]` on; logits of the last one, or of `every`.

        ids s32[b, n] with n a context bucket or 1; a row of length 0 stays as it is. Row i has slot `slots[i]`, or
        slot i where b is the number of slots. `end[i]` is where the row's tokens at hand end, when they are fed in
        several calls. -> f32[b, 1 or n, vocab]
        """
        rows, active = ids.shape
        slots = np.arange(rows) if slots is None else slots
        width = self.options.buckets.width(max(active, int((start + length).max())))
        parts = self._parts(Shape(rows, active, width, every and active > 1))
        self._wipe(slots[(start == 0) & (length > 0)])
        packed = np.concatenate([np.stack([slots, start, length, end], 1), ids], 1).astype(np.int32)
        with self.guarded():
            logits = self._run(parts, self.runtime.put([packed])).numpy()
        self.tainted[slots[(length > 0) & ~np.isfinite(logits).all((1, 2))]] = True
        return logits

    def states(self, ids: Array, start: int, end: int, given: Sequence[Array] | None = None) -> list[Array]:
        """Feed ids s32[n], no more than a context bucket takes, from position `start` on to slot 0.

        -> what the embedding and each layer make of them, f32[n, h], and the logits, f32[n, vocab]. With `given`, a
        part after the embedding takes the next of these in place of what the part before it has made. `end` as in
        `run`.
        """
        count, active = len(ids), 1 if len(ids) == 1 else self.options.buckets.active(len(ids))
        packed = np.zeros((1, 4 + active), np.int32)
        packed[0, : 4 + count] = [0, start, count, end, *ids]
        parts = self._parts(Layerwise(1, active, self.options.buckets.width(max(active, start + count)), every=True))
        made: list[Array] = []

        def between(out: DeviceTensor) -> DeviceTensor:
            state = out.numpy()
            made.append(state[0, :count].astype(np.float32))
            if given is None or len(made) == len(parts):
                return out
            state = state.copy()
            state[0, :count] = given[len(made) - 1]
            return self.runtime.put([state])

        with self.guarded():
            self._run(parts, self.runtime.put([packed]), between=between)
        return made

    def loop(self, rows: Array, seen: Array, steps: int) -> Array:
        """Make tokens until no row wants more, at most `steps` of one program. -> s32[slots, ·]

        rows s32[slots, LOOP_COLUMNS] and seen pred[slots, vocab] as `Programs.loop` has them.
        """
        if not self.runtime.loops:
            return self._loop_on_host(rows.copy(), seen.copy(), steps)
        rows, width = self.capped(rows, steps)
        parts = self._parts(Loop(width, max(steps, self.options.chunk)))
        with self.guarded():
            tokens = self._run(parts, self.runtime.put([rows]), self.runtime.put([seen])).numpy()
        return self.noted(tokens)[:, :steps]

    def _loop_on_host(self, rows: Array, seen: Array, steps: int) -> Array:
        """As `loop`, by two programs for each token. Writes to its operands."""
        columns: list[Array] = []
        while len(columns) < steps and (rows[:, 2] > 0).any():
            active = rows[:, 2] > 0
            end = rows[:, 1] + active
            logits = self.run(rows[:, :1], rows[:, 1], active.astype(np.int32), end)[:, -1]
            chosen = self.choose(logits, seen, np.concatenate([end[:, None], rows[:, POLICY]], 1))
            chosen = np.where(active, chosen, NOTHING)
            found = np.flatnonzero(chosen >= 0)
            seen[found, chosen[found]], rows[found, 0] = True, chosen[found]
            ended = (chosen < 0) | (chosen[:, None] == rows[:, EOS]).any(1)
            rows[:, 1], rows[:, 2] = end, np.where(ended, 0, rows[:, 2] - active)
            columns.append(chosen)
        return np.stack(columns, 1)

    def capped(self, rows: Array, steps: int) -> tuple[Array, int]:
        """`rows` of a loop that want at most `steps` tokens, and the positions that it may look back to."""
        capped = rows.copy()
        capped[:, 2] = np.minimum(rows[:, 2], steps)
        active = capped[capped[:, 2] > 0]
        return capped, self.options.buckets.width(int((active[:, 1] + active[:, 2]).max()))

    def noted(self, tokens: Array) -> Array:
        """Tokens that a program has chosen, s32[slots, n]; where one is BROKEN, the caches are as well."""
        self.tainted |= (tokens == BROKEN).any(1)
        return tokens

    def verify(self, ids: Array, start: Array, length: Array, policy: Array, seen: Array) -> Array:
        """Feed as `run` does, a row per slot, and choose after each token. -> s32[slots, n]

        policy s32[slots, POLICY_COLUMNS] and seen pred[slots, vocab] as `Programs.verify` has them.
        """
        active, end = ids.shape[1], start + length
        parts = self._parts(Verify(active, self.options.buckets.width(max(active, int(end.max())))))
        packed = np.concatenate([np.stack([np.arange(self.slots), start, length, end], 1), ids], 1).astype(np.int32)
        with self.guarded():
            tokens = self._run(parts, *(self.runtime.put([operand]) for operand in (packed, policy, seen))).numpy()
        return self.noted(tokens)

    def choose(self, logits: Array, seen: Array, rows: Array) -> Array:
        """The next token of each row, or BROKEN. Operands as `Programs.choice` has them. -> s32[rows]"""
        [(_, program)] = self._parts(Choice(len(rows)))
        [tokens] = program(*(self.runtime.put([operand]) for operand in (logits, seen, rows)))
        return tokens.numpy()

    def reorder(self, source: Array) -> None:
        """Slot `i` goes on with the sequence of slot `source[i]`, or with none where that is negative. s32[slots]"""
        [(_, program)] = self._parts(Reorder())
        with self.guarded():
            self.caches = program(self.runtime.put([source.astype(np.int32)]), *self.caches)
        self.tainted = self.tainted[source] & (source >= 0)

    def _wipe(self, slots: Array) -> None:
        """A NaN left in a cache would reach whoever uses the slot next: attention weighs it with zero."""
        if self.tainted[slots].any():
            source = np.arange(self.slots)
            source[slots] = -1
            self.reorder(source)

    def _run(
        self,
        parts: Built,
        *operands: DeviceTensor,
        between: Callable[[DeviceTensor], DeviceTensor] = lambda out: out,
    ) -> DeviceTensor:
        first, arrays = 0, len(self.programs.cache_arrays)
        for piece, executable in parts:
            layers = range(first, first + len(piece.layers))
            caches = slice(layers.start * arrays, layers.stop * arrays)
            weights = self.operands(layers, shared=piece.embed or piece.head)
            out, *self.caches[caches] = executable(*operands, *self.caches[caches], *weights)
            operands = operands[0], between(out)
            first = layers.stop
        return operands[1]

    def operands(self, layers: Iterable[int], shared: bool = True) -> list[DeviceTensor]:
        """The weights of these layers, after those of none, in the order of a program's parameters."""
        table = self.programs.shared_table if shared else []
        outside = [self.weights[None, row.name] for row in table]
        return [*outside, *(self.weights[layer, row.name] for layer in layers for row in self.programs.layer_table)]

    @property
    def held(self) -> Held:
        """What is on the devices, and what programs that were built take besides."""
        weights = {id(tensor): tensor.nbytes for tensor in self.weights.values()}
        temporaries = [executable.memory().temporaries for _, executable in self.executables.values()]
        caches = sum(cache.nbytes for cache in self.caches)
        return Held(sum(weights.values()), caches, max(temporaries, default=0) * self.runtime.device_count)

    @contextmanager
    def watched(self, watch: Callable[[str, Executable], Executable]) -> Iterator[None]:
        """Programs, by their names for people, are replaced meanwhile."""
        built = self._built
        self._built = {
            what: [(piece, watch(title(what, piece), executable)) for piece, executable in parts]
            for what, parts in built.items()
        }
        try:
            yield
        finally:
            self._built = built

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Caches that were given away to a program that did not return them are made anew."""
        try:
            yield
        except BaseException:
            self.reset()
            raise


def title(what: What, piece: Piece) -> str:
    """A program's name for people: loop_width128_steps32."""
    sizes = [f"{name}{value}" for name, value in vars(what).items() if value is not False]
    parts = ["embed"] * piece.embed + [f"layers{len(piece.layers)}"] * bool(piece.layers) + ["head"] * piece.head
    return "_".join([type(what).__name__.lower(), *sizes, *(parts if len(parts) == 1 else [])])
