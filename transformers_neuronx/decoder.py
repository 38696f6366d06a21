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

from transformers_neuronx.cache import Saved, build
from transformers_neuronx.compiler import identity
from transformers_neuronx.config import CompileOptions
from transformers_neuronx.errors import InputError
from transformers_neuronx.keys import Choice, Head, Layerwise, Loop, Piece, Reorder, Shape, Verify, What, title
from transformers_neuronx.layers import frequencies_in_checkpoints
from transformers_neuronx.layers.choice import BROKEN, NOTHING
from transformers_neuronx.loading import Progress, put_all
from transformers_neuronx.loops import EOS, POLICY
from transformers_neuronx.module import Checkpoint
from transformers_neuronx.origin import Marks
from transformers_neuronx.programs import DecoderConfig, Family, Programs
from transformers_neuronx.pyhlo import HloModuleProto
from transformers_neuronx.pyhlo.dtypes import element_type
from transformers_neuronx.runtimes.base import DeviceTensor, Executable, Runtime
from transformers_neuronx.weights import Key, Sharded, resolve, shards

Array = np.ndarray[Any, Any]
Built = list[tuple[Piece, Executable]]


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
        self.origin: Marks = {}  # of the checkpoint that they are of
        self.caches: list[DeviceTensor] = []
        self.seen: list[DeviceTensor] = []  # one, of the tokens that each slot's sequence has, once it is needed
        self.saved: Saved | None = None  # the programs of an artifact
        self.executables: dict[str, tuple[HloModuleProto, Executable]] = {}  # by the identity of the module
        self.asked: dict[str, str] = {}  # the identity of the module for a program, which the artifact will know by it
        self._built: dict[What, Built] = {}
        self.tainted = np.zeros(self.slots, bool)  # slots whose caches may hold NaN
        self.filled = np.zeros(self.slots, np.int64)  # positions of each slot that have been written
        self.load_seconds = self.compile_seconds = 0.0

    def __del__(self) -> None:
        runtime = self.__dict__.get("runtime")
        self.__dict__.clear()
        if runtime is not None:
            runtime.let_go()

    # Loading and compiling.

    def read(self, checkpoint: Checkpoint) -> Iterator[Sharded]:
        """The checkpoint's weights for the devices, after it has been checked whole."""
        weights, table = self.family.weights, self.programs.table
        ignored = [*weights.ignored(self.config), *frequencies_in_checkpoints(self.config)]
        resolved = resolve(table, self.config.n_layer, checkpoint, weights.PREFIX, ignored)
        return shards(resolved, checkpoint, self.options.amp, self.runtime.device_count)

    def take(self, weights: Iterable[Sharded], progress: Progress = lambda done: None) -> None:
        """Bring weights to the devices. Reports each weight."""
        began = perf_counter()
        self.weights = put_all(self.runtime, weights, progress)
        self.load_seconds += perf_counter() - began
        self.reset()

    def planned(self) -> list[What]:
        """The programs that calls need: a prompt in every context bucket and the logits of all its tokens, one token,
        the loop over tokens, the choice of tokens, and the exchange of slots, for beams and prompts of several rows.
        """
        prompts, context, widths = self.options.prompt_batch_size, self.options.buckets.context, self.programs.widths
        steps = [Shape(prompts, n, width) for n in context for width in widths(n)]
        tokens = [Shape(self.slots, 1, width) for width in widths(1)]
        loops = [Loop(width, self.options.chunk) for width in widths(1)] if self.loops else []
        choices = [Choice(rows) for rows in sorted({prompts if context else self.slots, self.slots})]
        return [*steps, *(Head(prompts, n) for n in context), *tokens, *loops, *choices, Reorder()]

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

        missing = self.missing(wanted)
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

    def missing(self, wanted: Iterable[What]) -> list[What]:
        """Those of the programs that are not there yet, each once."""
        return [what for what in dict.fromkeys(wanted) if what not in self._built]

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
        self.tainted[:], self.filled[:], self.seen = False, 0, []
        layer = [np.zeros(a.sizes, element_type(a.dtype).numpy) for a in self.programs.cache_arrays]
        self.caches = [self.runtime.put([zeros]) for _ in range(self.config.n_layer) for zeros in layer]

    def run(
        self, ids: Array, start: Array, length: Array, end: Array, slots: Array | None = None, every: bool = False
    ) -> Array:
        """The logits of a `step`, on the host."""
        made = self.step(ids, start, length, end, slots, every)
        with self.guarded():  # what goes wrong in a program is known when it is waited for
            logits = made.numpy()
        slots = np.arange(len(ids)) if slots is None else slots
        self.tainted[slots[(length > 0) & ~np.isfinite(logits).all((1, 2))]] = True
        return logits

    def step(
        self, ids: Array, start: Array, length: Array, end: Array, slots: Array | None = None, every: bool = False
    ) -> DeviceTensor:
        """Feed `length[i]` of `ids[i]` from position `start[i]` on; logits of the last one, or of `every`.

        ids s32[b, n] with n a context bucket or 1; a row of length 0 stays as it is. Row i has slot `slots[i]`, or
        slot i where b is the number of slots. `end[i]` is where the row's tokens at hand end, when they are fed in
        several calls. -> f32[b, 1 or n, vocab]. Raises InputError for tokens that follow none in their slot.
        """
        rows, active = ids.shape
        slots = np.arange(rows) if slots is None else slots
        self._wipe(slots[(start == 0) & (length > 0)])
        self.fill(slots, start, length)
        parts = self._parts(Shape(rows, active, self.programs.width(active, int((start + length).max()))))
        packed = np.concatenate([np.stack([slots, start, length, end], 1), ids], 1).astype(np.int32)
        if not every or active == 1:
            with self.guarded():
                return self._run(parts, self.runtime.put([packed]))[0]
        whole = len(parts) == 1
        with self.guarded():
            hidden = self._run(parts if whole else parts[:-1], self.runtime.put([packed]))[-1]
        [(_, head)] = self._parts(Head(rows, active))
        return head(hidden, *self.operands([]))[0]

    def fill(self, slots: Array, start: Array, length: Array) -> None:
        """Note what is written to the slots. What is between it and what was written before would be read as well."""
        fed = length > 0
        slots, start, end = slots[fed], start[fed], (start + length)[fed]
        apart = np.flatnonzero(start > self.filled[slots])
        if apart.size:
            slot = int(slots[apart[0]])
            raise InputError(
                f"tokens from position {start[apart[0]]} on must follow those before: slot {slot} holds "
                f"{self.filled[slot]} tokens (none after a failed call or reset); feed the sequence from its beginning"
            )
        self.filled[slots] = end

    def states(self, ids: Array, start: int, end: int, given: Sequence[Array] | None = None) -> list[Array]:
        """Feed ids s32[n], no more than a context bucket takes, from position `start` on to slot 0.

        -> what the embedding and each layer make of them, f32[n, h], and the logits, f32[n, vocab]. With `given`, a
        part after the embedding takes the next of these in place of what the part before it has made. `end` as in
        `run`.
        """
        count, active = len(ids), 1 if len(ids) == 1 else self.options.buckets.active(len(ids))
        packed = np.zeros((1, 4 + active), np.int32)
        packed[0, : 4 + count] = [0, start, count, end, *ids]
        self.fill(*np.array([[0], [start], [count]]))
        parts = self._parts(Layerwise(1, active, self.programs.width(active, start + count)))
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

    def note(self, seen: Array) -> None:
        """Which tokens each slot's sequence has, pred[slots, vocab]: these are penalized, and those chosen since."""
        self.seen = [self.runtime.put([seen])]

    def seen_now(self) -> list[DeviceTensor]:
        """The operand of programs that choose."""
        if not self.seen:
            self.note(np.zeros((self.slots, self.config.vocab_size), bool))
        return self.seen

    def loop(self, rows: Array, steps: int) -> Array:
        """Make tokens until no row wants more, at most `steps`, or as many as one program makes. -> s32[slots, ·]

        rows s32[slots, LOOP_COLUMNS] as `Programs.loop` has them.
        """
        if not self.loops:
            return self._loop_on_host(rows.copy(), steps)
        rows, width = self.capped(rows, min(steps, self.options.chunk))
        parts = self._parts(Loop(width, self.options.chunk))
        self.fill(np.arange(self.slots), rows[:, 1], rows[:, 2])
        with self.guarded():
            tokens, *self.seen = self._run(parts, self.runtime.put([rows]), *self.seen_now())
            return self.noted(tokens.numpy())[:, :steps]

    def _loop_on_host(self, rows: Array, steps: int) -> Array:
        """As `loop`, by two programs for each token, between which logits stay on the devices. Writes to `rows`."""
        columns: list[Array] = []
        while len(columns) < steps and (rows[:, 2] > 0).any():
            active = rows[:, 2] > 0
            end = rows[:, 1] + active
            logits = self.step(rows[:, :1], rows[:, 1], active.astype(np.int32), end)
            slots = np.where(active, np.arange(self.slots), NOTHING)
            chosen = self.choose(logits, slots, end, rows[:, POLICY])
            rows[chosen >= 0, 0] = chosen[chosen >= 0]
            ended = (chosen < 0) | (chosen[:, None] == rows[:, EOS]).any(1)
            rows[:, 1], rows[:, 2] = end, np.where(ended, 0, rows[:, 2] - active)
            columns.append(chosen)
        return np.stack(columns, 1)

    def capped(self, rows: Array, steps: int) -> tuple[Array, int]:
        """`rows` of a loop that want at most `steps` tokens, and the positions that it may look back to."""
        capped = rows.copy()
        capped[:, 2] = np.minimum(rows[:, 2], steps)
        active = capped[capped[:, 2] > 0]
        return capped, self.programs.width(1, int((active[:, 1] + active[:, 2]).max()))

    def noted(self, tokens: Array) -> Array:
        """Tokens that a program has chosen, s32[slots, n]; where one is BROKEN, the caches are as well."""
        self.tainted |= (tokens == BROKEN).any(1)
        return tokens

    def verify(self, ids: Array, start: Array, length: Array, policy: Array) -> Array:
        """Feed as `step` does, a row per slot, and choose after each token. -> s32[slots, n]

        policy s32[slots, POLICY_COLUMNS] as `Programs.verify` has it. What is chosen is not noted as seen.
        """
        active, end = ids.shape[1], start + length
        parts = self._parts(Verify(active, self.programs.width(1, max(active, int(end.max())))))
        self.fill(np.arange(self.slots), start, length)
        packed = np.concatenate([np.stack([np.arange(self.slots), start, length, end], 1), ids], 1).astype(np.int32)
        with self.guarded():
            operands = (self.runtime.put([operand]) for operand in (packed, policy))
            return self.noted(self._run(parts, *operands, *self.seen_now())[0].numpy())

    def choose(self, logits: DeviceTensor, slots: Array, position: Array, policy: Array) -> Array:
        """The next token of each row, or BROKEN; NOTHING where its slot is negative. -> s32[rows]

        Logits f32[rows, 1, vocab], as `step` leaves them on the devices; slots, position [rows]; policy s32[rows,
        POLICY_COLUMNS].
        """
        [(_, program)] = self._parts(Choice(len(slots)))
        packed = np.concatenate([np.stack([slots, position], 1), policy], 1).astype(np.int32)
        with self.guarded():
            tokens, *self.seen = program(logits, *self.seen_now(), self.runtime.put([packed]))
            chosen = tokens.numpy()
        self.tainted[slots[chosen == BROKEN]] = True
        return chosen

    def reorder(self, source: Array) -> None:
        """Slot `i` goes on with the sequence of slot `source[i]`, or with none where that is negative. s32[slots]"""
        [(_, program)] = self._parts(Reorder())
        with self.guarded():
            self.caches = program(self.runtime.put([source.astype(np.int32)]), *self.caches)
        self.tainted, self.filled = self.tainted[source] & (source >= 0), self.filled[source] * (source >= 0)

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
    ) -> list[DeviceTensor]:
        """Run the parts of a program one after the other. What the last results in, but the caches."""
        first, arrays = 0, len(self.programs.cache_arrays)
        own: list[DeviceTensor] = []
        for piece, executable in parts:
            layers = range(first, first + len(piece.layers))
            caches = slice(layers.start * arrays, layers.stop * arrays)
            weights = self.operands(layers, shared=piece.embed or piece.head)
            results = executable(*operands, *self.caches[caches], *weights)
            kept = len(results) - arrays * len(layers)
            own, self.caches[caches] = results[:kept], results[kept:]
            operands = operands[0], between(own[0])
            first = layers.stop
        return [operands[1], *own[1:]]

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
