"""Runs one model's programs with the weights and caches that are on the devices.

A program is compiled ahead of time, or when a call first needs it. All programs share one set of weights and one cache
per layer, which stay on the devices. Subclasses know what a cache is divided into: slots, pages, or blocks of the
caller. This file does not know how tokens are sampled or graphs are built.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any, ClassVar, NamedTuple

import numpy as np

from transformers_neuronx.config import CompileOptions
from transformers_neuronx.engine.encoding import SourceMemory
from transformers_neuronx.engine.family import DecoderConfig, Family
from transformers_neuronx.engine.images import Pictured, continued
from transformers_neuronx.engine.inputs import Rows
from transformers_neuronx.engine.keys import ProgramKey
from transformers_neuronx.engine.kv_cache import Given
from transformers_neuronx.engine.loading import Progress, put_all
from transformers_neuronx.engine.loops import SAMPLE
from transformers_neuronx.engine.programs import Programs
from transformers_neuronx.engine.rectangles import SampleKey
from transformers_neuronx.engine.store import Built, ProgramStore
from transformers_neuronx.engine.tower import Tower
from transformers_neuronx.errors import InputError
from transformers_neuronx.layers import frequencies_in_checkpoints
from transformers_neuronx.layers.rows import words
from transformers_neuronx.runtimes.base import DeviceTensor, Runtime
from transformers_neuronx.weights.checkpoint import Checkpoint
from transformers_neuronx.weights.origin import Marks
from transformers_neuronx.weights.reading import Key, Sharded, resolve, shards

Array = np.ndarray[Any, Any]


class MemoryUse(NamedTuple):
    """Bytes on all devices: weights, caches, and temporaries of the largest program."""

    weights: int
    caches: int
    temporaries: int


class Decoder(ABC):
    """A family's graph and one checkpoint's weights on a runtime. Sequences have the `slots` 0, 1, …"""

    programs_of: ClassVar[type[Programs]] = Programs

    def __init__(self, family: Family, config: DecoderConfig, runtime: Runtime, options: CompileOptions) -> None:
        self.family = family
        self.config = config
        self.runtime = runtime
        self.options = options
        self.slots = options.batch_size
        devices = runtime.device_count, runtime.panels, runtime.attends_in_place, runtime.scatters
        self.programs = self.programs_of(family, config, options, *devices)
        self.weights: dict[Key, DeviceTensor] = {}
        self._operands: dict[tuple[range, bool], list[DeviceTensor]] = {}
        self.origin: Marks = {}  # of the checkpoint that the weights came from
        self.caches: list[DeviceTensor] = []
        self.version = 0  # changes whenever a sequence does
        self.seen: list[DeviceTensor] = []  # once needed, one: the tokens that each slot's sequence has
        self.store = ProgramStore(runtime, self.programs, options.workers)
        self.memory = SourceMemory(runtime, self.store, self.weights, options.prompt_batch_size)
        self.tower = Tower(runtime, self.store, self.weights)
        self.later = np.zeros(self.slots, np.int64)  # the offset of positions after a prompt with images, by slot
        self.load_seconds = 0.0

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        runtime = self.__dict__.get("runtime")
        self.__dict__.clear()
        if runtime is not None and not ends():  # the process ends, and modules may be gone
            runtime.let_go()

    # Loading and compiling.

    def read(self, checkpoint: Checkpoint, shared: Collection[Key] = ()) -> Iterator[Sharded]:
        """Check the whole checkpoint, and return an iterator over its weights, sharded for the devices here; without
        those that are `shared` with another decoder, outside the layers.
        """
        weights = self.family.weights
        table = [row for row in self.programs.table if (None, row.name) not in shared]
        ignored = [*weights.ignored(self.config), *frequencies_in_checkpoints(self.config)]
        resolved = resolve(table, self.programs.layers, checkpoint, weights.PREFIX, ignored)
        runtime = self.runtime
        return shards(resolved, checkpoint, self.options.amp, runtime.device_count, runtime.here)

    def take(self, weights: Iterable[Sharded], progress: Progress = lambda done: None) -> None:
        """Load weights onto the devices and reset all sequences. `progress` is called with each weight's name."""
        with self.loading():
            self.weights.update(put_all(self.runtime, weights, progress))

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Inside, `weights` may change."""
        began = perf_counter()
        yield
        self._operands.clear()
        self.load_seconds += perf_counter() - began
        self.reset()

    @property
    def loops(self) -> bool:
        """Whether tokens are generated in a loop on the devices."""
        return self.options.chunk > 0 and self.options.unroll is None and self.runtime.loops

    # Running.

    @abstractmethod
    def planned(self) -> list[ProgramKey]:
        """Return the keys of the programs that calls need."""

    def planned_for(self, lengths: Sequence[int]) -> list[ProgramKey]:
        """Return the keys of the programs that are needed to sample after one prompt at a time, of these lengths."""
        return self.planned()

    @abstractmethod
    def verifying(self, guesses: int) -> Sequence[ProgramKey]:
        """Return the keys of the programs that verify up to so many draft tokens of each row."""

    @abstractmethod
    def given(self, slot: int, start: int, end: int) -> Given:
        """Let a request have the sequence of a slot, and continue it from position `start` on, up to `end`.

        Raises InputError for a gap, and for a slot without a source if there is an encoder.
        """

    @abstractmethod
    def leave(self, slot: int, end: int) -> None:
        """Take note that a request has left its slot, which holds positions up to `end`."""

    @abstractmethod
    def feed(self, rows: Rows, all_positions: bool = False) -> Array:
        """Feed rows. Return logits after the last token of each row, or after all tokens with `all_positions`.

        -> f32[batch, 1 or the longest row, vocab]. Raises InputError for tokens that do not directly follow those in
        their slot.
        """

    @abstractmethod
    def sample_after(self, rows: Rows, policy: Array, repeats: int = 1) -> Array:
        """Feed rows, and sample the token after each, or BROKEN; logits stay on the devices. -> s64[batch * repeats]

        policy s32[batch * repeats, POLICY_COLUMNS]. With `repeats`, several are sampled per row, for the slots 0, 1, …,
        which then have the sequences.
        """

    @abstractmethod
    def layerwise(self, ids: Array, start: int, end: int) -> tuple[Built, Array]:
        """Prepare a step of `ids` s32[n], at most a context bucket, in slot 0 from position `start` on.

        Returns its programs, one for each layer, and its rows. `end` is as in `StepInputs`.
        """

    def pictured(self, slot: int, start: int, prompt: Pictured | None) -> Pictured | None:
        """Return the images of tokens of a slot from position `start` on, where a prompt may begin."""
        if start == 0:
            self.later[slot] = prompt.later if prompt else 0
        return prompt or continued(int(self.later[slot]))

    @abstractmethod
    def reorder(self, source: Array) -> None:
        """Give slot `i` the sequence of slot `source[i]`, or clear it where that is negative. source [slots]"""

    def repeat(self, prompts: int, repeats: int) -> None:
        """Give the sequences of the first `prompts` slots to the others, so that each is there `repeats` times."""
        if repeats > 1:
            self.reorder(np.tile(np.arange(prompts), repeats))

    def reset(self) -> None:
        """Forget all sequences and sources: fill the caches with zeros."""
        self.seen, self.version = [], self.version + 1
        self.memory.reset()
        self.tower.reset()
        self.caches[:] = [self.runtime.put([zeros]) for zeros in self.programs.cache.zeros()]

    def note(self, seen: Array) -> None:
        """Set which tokens each slot's sequence has, pred[slots, vocab]. Penalties apply to them and to later ones."""
        self.seen = [self.runtime.put([seen])]

    def seen_now(self) -> list[DeviceTensor]:
        """The `seen` operand of programs that sample."""
        if not self.seen:
            self.note(np.zeros((self.slots, self.config.vocab_size), bool))
        return self.seen

    def sample(self, logits: DeviceTensor, slots: Array, position: Array, policy: Array) -> Array:
        """Sample the next token of each row, or BROKEN; NOTHING where its slot is negative. -> s32[rows]

        Logits f32[rows, 1, vocab] are on the devices, as `step` returns them; slots and position [rows]; policy
        s32[rows, POLICY_COLUMNS].
        """
        [(_, program)] = self.store.parts(SampleKey(len(slots)))
        rows = np.zeros(len(slots), SAMPLE)
        rows["slot"], rows["position"], rows["policy"] = slots, position, policy
        with self.guarded():
            tokens, *self.seen = program(logits, *self.seen_now(), self.runtime.put([words(rows)]))
            sampled: Array = tokens.numpy()
            return sampled

    def execute(
        self,
        parts: Built,
        *operands: DeviceTensor,
        between: Callable[[DeviceTensor], DeviceTensor] = lambda out: out,
        placed: Sequence[DeviceTensor] = (),
    ) -> list[DeviceTensor]:
        """Run the parts of a program in order, each with what is `placed` in a step. Return the results of the last
        one, without the caches.
        """
        first = 0
        own: list[DeviceTensor] = []
        for segment, executable in parts:
            layers = range(first, first + len(segment.layers))
            caches = self.programs.cache.span(layers)
            weights = self.operands(layers, shared=segment.embed or segment.head)
            results = executable(*operands, *self.caches[caches], *weights, *placed)
            kept = len(results) - (caches.stop - caches.start)
            own, self.caches[caches] = results[:kept], results[kept:]
            operands = operands[0], between(own[0])
            first = layers.stop
        return [operands[1], *own[1:]]

    def encode(self, sources: Sequence[Array], slots: Array) -> None:
        """Encode sources, s32[·] each, or f32[*source_sizes]. From now on these slots attend to them."""
        with self.guarded():
            self.memory.encode(sources, slots)

    def redirect(self, source: Array) -> None:
        """Let slot `i` attend to the source of slot `source[i]` from now on. s32[slots]"""
        with self.guarded():
            self.memory.redirect(source)

    def operands(self, layers: range, shared: bool = True, memory: SourceMemory | None = None) -> list[DeviceTensor]:
        """Return the weights outside the layers, then those of `layers`, in the order of a program's parameters, and
        their memory: this one, or else the decoder's own.
        """
        if (layers, shared) not in self._operands:
            programs = self.programs
            outside = [self.weights[None, row.name] for row in (programs.shared_table if shared else [])]
            named = ((layer, row.name) for layer in layers for row in programs.rows_of(layer))
            self._operands[layers, shared] = [*outside, *(self.weights[key] for key in named)]
        return self._operands[layers, shared] + (memory or self.memory).operands(layers)

    @property
    def memory_use(self) -> MemoryUse:
        """Bytes of weights and caches on the devices, and the largest temporaries of the programs loaded so far."""
        weights = {id(tensor): tensor.nbytes for tensor in self.weights.values()}
        caches = sum(cache.nbytes for cache in self.caches) + self.memory.nbytes
        return MemoryUse(sum(weights.values()), caches, self.store.temporaries * self.runtime.device_count)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Reset all sequences after an error: the failed program may have taken the caches without returning them."""
        try:
            yield
        except BaseException:
            self.reset()
            raise


def gap(slot: int, start: int, filled: int) -> InputError:
    """Return the error that tokens do not directly follow those in their slot."""
    return InputError(
        f"tokens from position {start} on would leave a gap: slot {slot} holds {filled} tokens (none after a failed "
        "call or reset); feed the sequence from its beginning"
    )
