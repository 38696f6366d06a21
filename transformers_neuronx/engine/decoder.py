"""Runs one model's programs with the weights and caches that are on the devices.

A program is compiled ahead of time, or when a call first needs it. All programs share one set of weights and one cache
per layer, which stay on the devices. This file does not know how tokens are sampled or graphs are built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, ClassVar, NamedTuple

import numpy as np

from transformers_neuronx.config import CompileOptions
from transformers_neuronx.engine.family import DecoderConfig, Family
from transformers_neuronx.engine.keys import (
    HeadKey,
    LoopKey,
    ProgramKey,
    ReorderKey,
    SampleKey,
    StepKey,
    VerifyKey,
)
from transformers_neuronx.engine.loading import Progress, put_all
from transformers_neuronx.engine.loops import SAMPLE
from transformers_neuronx.engine.programs import Programs
from transformers_neuronx.engine.store import Built, ProgramStore
from transformers_neuronx.errors import InputError
from transformers_neuronx.layers import frequencies_in_checkpoints
from transformers_neuronx.layers.rows import words
from transformers_neuronx.layers.sampling import BROKEN, NOTHING
from transformers_neuronx.layers.step import step_row
from transformers_neuronx.runtimes.base import DeviceTensor, Runtime
from transformers_neuronx.weights.checkpoint import Checkpoint
from transformers_neuronx.weights.origin import Marks
from transformers_neuronx.weights.reading import Key, Sharded, resolve, shards

Array = np.ndarray[Any, Any]


class StepInputs(NamedTuple):
    """What a step feeds: `length[i]` tokens of `ids[i]` to slot `slots[i]`, from position `start[i]` on.

    ids s32[b, n], where n is a context bucket or 1; the others s32[b]. A row of length 0 changes nothing. `end[i]` is
    the position after the row's last token; it is past this step if the row is fed in several steps.
    """

    ids: Array
    start: Array
    length: Array
    end: Array
    slots: Array


def packed_step(fed: StepInputs) -> Array:
    """Return a step as its program gets it: rows of `step_row`, as s32[b, columns]."""
    rows = np.zeros(len(fed.ids), step_row(fed.ids.shape[1]))
    for name, value in zip(("ids", "start", "length", "end", "slot"), fed, strict=True):
        rows[name] = value
    return words(rows)


class MemoryUse(NamedTuple):
    """Bytes on all devices: weights, caches, and temporaries of the largest program."""

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
        devices = runtime.device_count, runtime.panels, runtime.attends_in_place
        self.programs = self.programs_of(family, config, options, *devices)
        self.weights: dict[Key, DeviceTensor] = {}
        self._operands: dict[tuple[range, bool], list[DeviceTensor]] = {}
        self.origin: Marks = {}  # of the checkpoint that the weights came from
        self.caches: list[DeviceTensor] = []
        self.seen: list[DeviceTensor] = []  # once needed, one: the tokens that each slot's sequence has
        self.store = ProgramStore(runtime, self.programs, options.workers)
        self.tainted = np.zeros(self.slots, bool)  # slots whose caches may hold NaN
        self.filled = np.zeros(self.slots, np.int64)  # number of positions written in each slot
        self.load_seconds = 0.0

    def __del__(self) -> None:
        runtime = self.__dict__.get("runtime")
        self.__dict__.clear()
        if runtime is not None:
            runtime.let_go()

    # Loading and compiling.

    def read(self, checkpoint: Checkpoint) -> Iterator[Sharded]:
        """Check the whole checkpoint, and return an iterator over its weights, sharded for the devices."""
        weights, table = self.family.weights, self.programs.table
        ignored = [*weights.ignored(self.config), *frequencies_in_checkpoints(self.config)]
        resolved = resolve(table, self.programs.layers, checkpoint, weights.PREFIX, ignored)
        return shards(resolved, checkpoint, self.options.amp, self.runtime.device_count)

    def take(self, weights: Iterable[Sharded], progress: Progress = lambda done: None) -> None:
        """Load weights onto the devices and reset all sequences. `progress` is called with each weight's name."""
        began = perf_counter()
        self.weights = put_all(self.runtime, weights, progress)
        self._operands.clear()
        self.load_seconds += perf_counter() - began
        self.reset()

    def planned(self) -> list[ProgramKey]:
        """Return the keys of the programs that calls need: prefill in each context bucket, logits of all prompt tokens,
        single-token steps, the token loop, sampling, and reordering of slots (beams, prompts that serve several rows).
        """
        prompts, context, widths = self.options.prompt_batch_size, self.options.buckets.context, self.programs.widths
        steps = [StepKey(prompts, n, width) for n in context for width in widths(n)]
        tokens = [StepKey(self.slots, 1, width) for width in widths(1)]
        loops = [LoopKey(width, self.options.chunk) for width in widths(1)] if self.loops else []
        sampling = [SampleKey(rows) for rows in sorted({prompts if context else self.slots, self.slots})]
        return [*steps, *(HeadKey(prompts, n) for n in context), *tokens, *loops, *sampling, ReorderKey()]

    @property
    def loops(self) -> bool:
        """Whether tokens are generated in a loop on the devices."""
        return self.options.chunk > 0 and self.options.unroll is None and self.runtime.loops

    # Running.

    def reset(self) -> None:
        """Forget all sequences: fill the caches with zeros."""
        self.tainted[:], self.filled[:], self.seen = False, 0, []
        self.caches = [self.runtime.put([zeros]) for zeros in self.programs.cache.zeros()]

    def run(self, fed: StepInputs, all_positions: bool = False) -> Array:
        """Run a `step`, and return its logits on the host."""
        made = self.step(fed, all_positions)
        with self.guarded():  # an error in a program is raised when its result is read
            logits = made.numpy()
        self.tainted[fed.slots[(fed.length > 0) & ~np.isfinite(logits).all((1, 2))]] = True
        return logits

    def step(self, fed: StepInputs, all_positions: bool = False) -> DeviceTensor:
        """Feed tokens. Return logits after each row's last token, or after all: f32[b, 1 or n, vocab].

        Raises InputError for tokens that do not directly follow those in their slot.
        """
        rows, active = fed.ids.shape
        self._wipe(fed.slots[(fed.start == 0) & (fed.length > 0)])
        self.fill(fed.slots, fed.start, fed.length)
        parts = self.store.parts(
            StepKey(rows, active, self.programs.width(active, int((fed.start + fed.length).max())))
        )
        packed = packed_step(fed)
        if not all_positions or active == 1:
            with self.guarded():
                return self.execute(parts, self.runtime.put([packed]))[0]
        whole = len(parts) == 1
        with self.guarded():
            hidden = self.execute(parts if whole else parts[:-1], self.runtime.put([packed]))[-1]
        [(_, head)] = self.store.parts(HeadKey(rows, active))
        return head(hidden, *self.operands(range(0)))[0]

    def fill(self, slots: Array, start: Array, length: Array) -> None:
        """Record what is written to the slots. Raises InputError for a gap before it, which attention would read."""
        fed = length > 0
        slots, start, end = slots[fed], start[fed], (start + length)[fed]
        apart = np.flatnonzero(start > self.filled[slots])
        if apart.size:
            slot = int(slots[apart[0]])
            raise InputError(
                f"tokens from position {start[apart[0]]} on would leave a gap: slot {slot} holds "
                f"{self.filled[slot]} tokens (none after a failed call or reset); feed the sequence from its beginning"
            )
        self.filled[slots] = end

    def note(self, seen: Array) -> None:
        """Set which tokens each slot's sequence has, pred[slots, vocab]. Penalties apply to them and to later ones."""
        self.seen = [self.runtime.put([seen])]

    def seen_now(self) -> list[DeviceTensor]:
        """The `seen` operand of programs that sample."""
        if not self.seen:
            self.note(np.zeros((self.slots, self.config.vocab_size), bool))
        return self.seen

    def loop(self, rows: Array, steps: int) -> Array:
        """Generate at most `steps` tokens per row in one dispatch; stop when all rows are done. -> s32[slots, ·]

        rows [slots] are of `LOOP`.
        """
        if not self.loops:
            return self._loop_on_host(rows.copy(), steps)
        rows, width = self.capped(rows, min(steps, self.options.chunk))
        parts = self.store.parts(LoopKey(width, self.options.chunk))
        self.fill(np.arange(self.slots), rows["position"], rows["left"])
        with self.guarded():
            tokens, *self.seen = self.execute(parts, self.runtime.put([words(rows)]), *self.seen_now())
            return self.noted(tokens.numpy())[:, :steps]

    def _loop_on_host(self, rows: Array, steps: int) -> Array:
        """Do the same as `loop` with two programs per token; logits stay on the devices. Modifies `rows`."""
        columns: list[Array] = []
        token, position, left = (rows[name] for name in ("token", "position", "left"))
        while len(columns) < steps and (left > 0).any():
            active = left > 0
            end = position + active
            fed = StepInputs(token[:, None], position, active.astype(np.int32), end, np.arange(self.slots))
            logits = self.step(fed)
            slots = np.where(active, np.arange(self.slots), NOTHING)
            sampled = self.sample(logits, slots, end, rows["policy"])
            token[sampled >= 0] = sampled[sampled >= 0]
            ended = (sampled < 0) | (sampled[:, None] == rows["eos"]).any(1)
            position[:], left[:] = end, np.where(ended, 0, left - active)
            columns.append(sampled)
        return np.stack(columns, 1)

    def capped(self, rows: Array, steps: int) -> tuple[Array, int]:
        """Limit the `rows` of a loop to `steps` tokens each. Return them and the width that the loop needs."""
        capped = rows.copy()
        capped["left"] = np.minimum(rows["left"], steps)
        active = capped[capped["left"] > 0]
        return capped, self.programs.width(1, int((active["position"] + active["left"]).max()))

    def noted(self, tokens: Array) -> Array:
        """Mark slots with a BROKEN token as tainted. Return the sampled tokens, s32[slots, n], unchanged."""
        self.tainted |= (tokens == BROKEN).any(1)
        return tokens

    def verify(self, ids: Array, start: Array, length: Array, policy: Array) -> Array:
        """Feed as `step` does, one row per slot, and sample after each token. -> s32[slots, n]

        policy s32[slots, POLICY_COLUMNS], as in `Programs.verify`. The sampled tokens are not recorded as seen.
        """
        active, end = ids.shape[1], start + length
        parts = self.store.parts(VerifyKey(active, self.programs.width(1, max(active, int(end.max())))))
        self.fill(np.arange(self.slots), start, length)
        packed = packed_step(StepInputs(ids, start, length, end, np.arange(self.slots)))
        with self.guarded():
            operands = (self.runtime.put([operand]) for operand in (packed, policy))
            return self.noted(self.execute(parts, *operands, *self.seen_now())[0].numpy())

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
            sampled = tokens.numpy()
        self.tainted[slots[sampled == BROKEN]] = True
        return sampled

    def reorder(self, source: Array) -> None:
        """Give slot `i` the sequence of slot `source[i]`, or clear it where that is negative. source [slots]"""
        [(_, program)] = self.store.parts(ReorderKey())
        with self.guarded():
            self.caches = program(self.runtime.put([source.astype(np.int32)]), *self.caches)
        self.tainted, self.filled = self.tainted[source] & (source >= 0), self.filled[source] * (source >= 0)

    def _wipe(self, slots: Array) -> None:
        """Clear these slots if one may hold NaN: attention weighs stale positions with zero, and 0 × NaN is NaN."""
        if self.tainted[slots].any():
            source = np.arange(self.slots)
            source[slots] = -1
            self.reorder(source)

    def execute(
        self,
        parts: Built,
        *operands: DeviceTensor,
        between: Callable[[DeviceTensor], DeviceTensor] = lambda out: out,
    ) -> list[DeviceTensor]:
        """Run the parts of a program in order. Return the results of the last one, without the caches."""
        first = 0
        own: list[DeviceTensor] = []
        for segment, executable in parts:
            layers = range(first, first + len(segment.layers))
            caches = self.programs.cache.span(layers)
            weights = self.operands(layers, shared=segment.embed or segment.head)
            results = executable(*operands, *self.caches[caches], *weights)
            kept = len(results) - (caches.stop - caches.start)
            own, self.caches[caches] = results[:kept], results[kept:]
            operands = operands[0], between(own[0])
            first = layers.stop
        return [operands[1], *own[1:]]

    def operands(self, layers: range, shared: bool = True) -> list[DeviceTensor]:
        """Return the weights outside the layers, then those of `layers`, in the order of a program's parameters."""
        if (layers, shared) not in self._operands:
            programs = self.programs
            outside = [self.weights[None, row.name] for row in (programs.shared_table if shared else [])]
            named = ((layer, row.name) for layer in layers for row in programs.rows_of(programs.layers[layer]))
            self._operands[layers, shared] = [*outside, *(self.weights[key] for key in named)]
        return self._operands[layers, shared]

    @property
    def memory_use(self) -> MemoryUse:
        """Bytes of weights and caches on the devices, and the largest temporaries of the programs built so far."""
        weights = {id(tensor): tensor.nbytes for tensor in self.weights.values()}
        caches = sum(cache.nbytes for cache in self.caches)
        return MemoryUse(sum(weights.values()), caches, self.store.temporaries * self.runtime.device_count)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Reset all sequences after an error: the failed program may have taken the caches without returning them."""
        try:
            yield
        except BaseException:
            self.reset()
            raise
