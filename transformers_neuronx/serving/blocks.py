"""A model over a cache of blocks that the caller gives to sequences: calls as plain data, its programs, its engine.

A step is one of single tokens, as in `steps`. A call that is longer than the largest step, or whose sequences read what
others of the same call write, is computed in several steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from transformers_neuronx.engine.decoder import Decoder
from transformers_neuronx.engine.inputs import Rows
from transformers_neuronx.engine.keys import ProgramKey
from transformers_neuronx.engine.kv_cache import Given
from transformers_neuronx.engine.programs import Programs
from transformers_neuronx.engine.store import Built
from transformers_neuronx.errors import InputError
from transformers_neuronx.layers.rows import joined
from transformers_neuronx.serving.step_writer import LOGITS, TOKEN, sequence_row
from transformers_neuronx.serving.steps import LogitsKey, logits_keys

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class BlockCall:
    """The tokens of some sequences side by side, s32[n]: `count[i]` of sequence i, from position `start[i]` on.

    start, count s32[sequences]. Row i of `tables`, s32[sequences, ·], has the blocks of sequence i in the order of its
    positions; after those in use it may have anything. `wanted` s32[m] are the tokens whose logits are returned.
    """

    tokens: Array
    start: Array
    count: Array
    tables: Array
    wanted: Array


class Part(NamedTuple):
    """Tokens that a step computes: `many` of row `row`, after the `fed` earlier ones."""

    row: int
    fed: int
    many: int


def in_steps(rows: Iterable[tuple[int, int]], most: int) -> Iterator[list[Part]]:
    """Divide rows, each with its number of tokens, into steps of up to `most` tokens, in this order."""
    step, room = list[Part](), most
    for row, length in rows:
        fed = 0
        while fed < length:
            count = min(length - fed, room)
            step.append(Part(row, fed, count))
            fed, room = fed + count, room - count
            if not room:
                yield step
                step, room = [], most
    if step:
        yield step


class BlockPrograms(Programs):
    """The programs of a model over blocks: steps of tokens that return logits. There are no others."""

    def __init__(self, *model: Any) -> None:
        super().__init__(*model)
        assert self.options.blocks is not None
        self.blocks = blocks = self.options.blocks
        self.cache = self.cache.paged(blocks.size, dict.fromkeys(self.cache.windows, blocks.count), 1)
        longest = max(*self.options.buckets.context, 1, self.slots)
        every = blocks.all_logits
        self.keys = logits_keys(longest, self.slots, -(-self.positions // blocks.size), every)

    @property
    def window(self) -> int:
        """The most positions that a token reads, with its own."""
        return max(window or self.positions for window in self.cache.windows)


class BlockDecoder(Decoder):
    """The engine of a model over blocks."""

    programs_of = BlockPrograms
    programs: BlockPrograms

    def planned(self) -> list[ProgramKey]:
        return [*self.programs.keys]

    def feed(self, rows: Rows, all_positions: bool = False) -> Array:
        raise no_slots()

    def sample_after(self, rows: Rows, policy: Array, repeats: int = 1) -> Array:
        raise no_slots()

    def given(self, slot: int, start: int, end: int) -> Given:
        raise no_slots()

    def leave(self, slot: int, end: int) -> None:
        raise no_slots()

    def layerwise(self, ids: Array, start: int, end: int) -> tuple[Built, Array]:
        raise no_slots()

    def reorder(self, source: Array) -> None:
        raise no_slots()

    def verifying(self, guesses: int) -> list[ProgramKey]:
        raise no_slots()

    def logits(self, call: BlockCall) -> Array:
        """Compute a call. Return logits after its wanted tokens, f32[m, vocab].

        Raises InputError for blocks that do not exist, and if two sequences write to the same block, or each reads what
        the other writes.
        """
        found = np.zeros((len(call.wanted), self.config.vocab_size), np.float32)
        before = np.cumsum(call.count) - call.count
        for step in self._steps(call):
            ids = np.concatenate([before[row] + np.arange(fed, fed + many) for row, fed, many in step])  # ascending
            rows = np.flatnonzero(np.isin(call.wanted, ids))
            found[rows] = self._run(call, step, ids, np.searchsorted(ids, call.wanted[rows]))
        return found

    def _run(self, call: BlockCall, step: list[Part], ids: Array, places: Array) -> Array:
        """Run a step. Return the logits after some of its tokens, f32[·, vocab]."""
        fits = [key for key in self.programs.keys if key.tokens >= len(ids) and key.logits >= len(places)]
        key = min(fits, key=lambda key: (key.tokens, key.logits))
        packed = joined(*self._packed(call, step, key, ids, places))
        with self.guarded():
            [result] = self.execute(self.store.parts(key), self.runtime.put([packed]))
            logits: Array = result.numpy()
        return logits[: len(places), 0]

    def _packed(self, call: BlockCall, step: list[Part], key: LogitsKey, ids: Array, places: Array) -> list[Array]:
        """Bring a step into the form of its program: rows of `TOKEN`, of `sequence_row` and of `LOGITS`."""
        layout, most = self.programs.cache, self.programs.blocks.count - 1
        tokens, segments = np.zeros(key.tokens, TOKEN), np.zeros(key.sequences, sequence_row(layout, key.pages))
        wanted = np.zeros(key.logits, LOGITS)
        tokens["id"][: len(ids)], wanted["token"][: len(places)] = call.tokens[ids], places
        first = 0
        for segment, (sequence, fed, count) in zip(segments, step, strict=False):
            start, end = call.start[sequence] + fed, call.start[sequence] + call.count[sequence]
            tokens["position"][first : first + count] = np.arange(start, start + count)
            tokens["end"][first : first + count] = end
            segment["first"], segment["count"], segment["start"] = first, count, start
            segment["of_prompt"] = call.count[sequence] > 1
            table = np.clip(call.tables[sequence][: key.pages], 0, most)
            segment["pages"].reshape(len(layout.windows), -1)[:, : len(table)] = table
            first += count
        return [tokens, segments, wanted]

    def _steps(self, call: BlockCall) -> Iterator[list[Part]]:
        """Divide a call into steps."""
        keys = self.programs.keys
        most = max(key.logits for key in keys)
        longest = keys[-1].tokens if len(call.wanted) <= most else most
        for level in [*self._levels(call)]:  # its errors come before anything runs
            yield from in_steps(((row, int(call.count[row])) for row in map(int, level)), longest)

    def _levels(self, call: BlockCall) -> Iterator[list[int]]:
        """Yield sequences that can be computed together: none reads what another of them writes."""
        reads, writes = self._used(call)
        writer = np.full(self.programs.blocks.count, -1)
        rows, columns = np.nonzero(writes)
        blocks = call.tables[rows, columns]
        writer[blocks] = rows
        if (twice := writer[blocks] != rows).any():
            one, block = rows[twice.argmax()], blocks[twice.argmax()]
            raise InputError(
                f"sequences {one} and {writer[block]} both write to block {block}: copy it for one of them"
            )
        others = np.where(reads, writer[np.where(reads, call.tables, 0)], -1)
        waits = {row: set(others[row].tolist()) - {-1, row} for row in np.flatnonzero(call.count).tolist()}
        while waits:
            ready = [row for row, before in waits.items() if not before & waits.keys()]
            if not ready:
                raise InputError(
                    f"sequences {sorted(waits)} read what others of them write: call them one after another"
                )
            yield ready
            waits = {row: before for row, before in waits.items() if row not in ready}

    def _used(self, call: BlockCall) -> tuple[Array, Array]:
        """Return which places of each table are read, and which are written. pred[sequences, ·] twice"""
        size, count, end = self.programs.blocks.size, self.programs.blocks.count, call.start + call.count
        oldest = np.maximum(call.start - self.programs.window + 1, 0)  # that the first token reads
        place = np.arange(call.tables.shape[1])
        used = (call.count > 0)[:, None] & (place <= ((end - 1) // size)[:, None])
        reads, writes = (used & (place >= (first // size)[:, None]) for first in (oldest, call.start))
        if (wrong := reads & ((call.tables < 0) | (call.tables >= count))).any():
            row, column = np.argwhere(wrong)[0]
            raise InputError(
                f"block_tables must have blocks from 0 to {count - 1} where a sequence has tokens, got "
                f"{call.tables[row, column]} for positions from {column * size} on of sequence {row}"
            )
        return reads, writes


def no_slots() -> InputError:
    """Return the error of a call that needs slots."""
    return InputError(
        "a model whose cache is in blocks has no slots: it answers forward() with input_metadata; for sample(), "
        "generate() and other calls, make a model without init_cache_engine()"
    )
