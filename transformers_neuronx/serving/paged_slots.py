"""A model whose slots are sequences over pages. What slots have in common they share, until one of them writes.

Calls of the model start, continue, copy and read these sequences: see `Decoder`. An `Engine` has a cache of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any
from weakref import proxy

import numpy as np

from transformers_neuronx.config import CompileOptions
from transformers_neuronx.engine.decoder import Array, Decoder, gap
from transformers_neuronx.engine.encoding import RedirectKey
from transformers_neuronx.engine.family import DecoderConfig, Family
from transformers_neuronx.engine.images import Pictured
from transformers_neuronx.engine.inputs import Rows
from transformers_neuronx.engine.keys import ProgramKey
from transformers_neuronx.engine.kv_cache import Given
from transformers_neuronx.engine.programs import Programs
from transformers_neuronx.engine.rectangles import SampleKey
from transformers_neuronx.engine.rules import GREEDY, penalty_of
from transformers_neuronx.engine.slots import SlotDecoder
from transformers_neuronx.engine.store import Built, ProgramStore
from transformers_neuronx.layers.rows import joined
from transformers_neuronx.layers.sampling import NOTHING
from transformers_neuronx.runtimes.base import Runtime
from transformers_neuronx.serving.blocks import BlockDecoder, Part, in_steps
from transformers_neuronx.serving.kv_cache import KVCache
from transformers_neuronx.serving.paged import PackedTokens, PagedSteps, on_devices
from transformers_neuronx.serving.pages import PAGE, Pages
from transformers_neuronx.serving.request import Request, SamplingParams
from transformers_neuronx.serving.scheduler import Work
from transformers_neuronx.serving.step_writer import TOKEN, sequence_row
from transformers_neuronx.serving.steps import (
    CopyKey,
    LayerKey,
    TokensKey,
    all_logits,
    call_keys,
    powers,
    smallest,
    verify_keys,
)

SMALLEST_PAGE = 16  # that kernels take
MOST_TOKENS = 2048  # of several prompts in a step


class PagedPrograms(Programs):
    """Writes the programs of a model whose slots are over pages."""

    def __init__(self, *model: Any) -> None:
        super().__init__(*model)
        self.page = min(PAGE, max(SMALLEST_PAGE, powers(self.positions)[-1]))  # positions
        self.pages = -(-self.positions // self.page)  # of a slot
        pages = dict.fromkeys(self.cache.windows, self.slots * self.pages)
        self.cache = self.cache.paged(self.page, pages, self.slots)


class PagedDecoder(Decoder):
    """A family's graph and one checkpoint's weights on a runtime, with the sequences of slots over pages."""

    programs_of = PagedPrograms
    programs: PagedPrograms

    def __init__(self, family: Family, config: DecoderConfig, runtime: Runtime, options: CompileOptions) -> None:
        super().__init__(family, config, runtime, options)
        self.steps = self._steps(self.store, call_keys(_sizes(options), self.slots, self.programs.pages))
        self.caches = self.steps.caches
        self._forget()

    def _steps(self, store: ProgramStore, keys: Sequence[TokensKey]) -> PagedSteps:
        own = proxy(self)  # a reference of its steps would let both wait for the garbage collector
        pools = [0] * len(self.programs.cache.windows)
        return PagedSteps(own, store, self.memory, keys, pools, overlaps=False, adjustments=False)

    def steps_with(self, features: tuple[int, ...]) -> PagedSteps:
        """Return steps over the same cache that return features, too: see `Programs.over`."""
        keys = [replace(key, features=True) for key in self.steps.keys]
        steps = self._steps(self.store.over(self.programs.cache, features=features), keys)
        steps.caches = self.caches
        steps.forget()
        return steps

    def _forget(self) -> None:
        self.pool = Pages(self.slots * self.programs.pages, self.programs.page)
        self.cache = KVCache([self.pool])
        self.tables: list[list[int]] = [[] for _ in range(self.slots)]
        self.filled = np.zeros(self.slots, np.int64)  # number of positions written in each slot

    def planned(self) -> list[ProgramKey]:
        """Return the keys of the programs that calls need: steps of tokens, those that return logits of all tokens of a
        prompt, copies of pages, sampling from logits of the host, and if there is an encoder, it for each source size.
        """
        logits = [all_logits(key) for key in self.steps.keys if key.samples < key.tokens <= self._most_of_all]
        redirects = [RedirectKey()] * bool(self.memory.layout)
        apart = [*self.memory.keys(), *self.tower.keys()]
        return [*apart, *self.steps.keys, *logits, CopyKey(), SampleKey(self.slots), *redirects]

    def planned_for(self, lengths: Sequence[int]) -> list[ProgramKey]:
        most = self.steps.most_tokens
        parts = {min(left, most) for length in (*lengths, 1) for left in range(length, 0, -most)}
        steps = [smallest(self.steps.keys, tokens, 1) for tokens in sorted(parts)]
        return [*self.memory.keys(), *self.tower.keys(), *steps]

    @property
    def _most_of_all(self) -> int:
        """The most tokens of a step that returns the logits of all."""
        sampling = (key.tokens for key in self.steps.keys if key.samples == key.tokens)
        return max(*sampling, *self.options.buckets.context, 0)

    def verifying(self, guesses: int) -> list[TokensKey]:
        more = verify_keys(guesses, self.slots, self.programs.pages)
        self.steps.keys += [key for key in more if key not in self.steps.keys]
        return more

    def reset(self) -> None:
        """Forget all sequences and sources."""
        self.seen, self.version = [], self.version + 1
        self._forget()
        self.steps.reset()

    def given(self, slot: int, start: int, end: int) -> Given:
        """Return the table of a slot, with pages up to `end` that no other slot has from position `start` on."""
        self._check([slot], [start])
        pool, table, size = self.pool, self.tables[slot], self.programs.page
        first = -(-start // size)  # pages with tokens before `start`
        kept, partly = table[:first], table[first - 1 : first] if start % size else []
        pool.release(table[first:])
        if copied := [page for page in partly if pool.is_shared(page)]:
            kept[-1:] = pool.allocate(1)
            self.steps.copy([((copied[0], kept[-1]),)])
            pool.release(copied)
        pages = pool.allocate(max(pool.needed(end) - len(kept), 0))
        self.tables[slot], self.filled[slot] = [*kept, *pages], end
        self.version += 1
        return Given([self.tables[slot]], [slot] * self.programs.cache.has_places)

    def feed(self, rows: Rows, all_positions: bool = False) -> Array:
        self._check(rows.slots, rows.start)
        longest = max(map(len, rows.tokens))
        logits = np.zeros((len(rows.tokens), longest if all_positions else 1, self.config.vocab_size), np.float32)
        policies = np.tile(GREEDY, (len(rows.tokens), 1))
        with self.guarded():
            for parts, packed in self._packed(rows, policies, all_positions):
                samples = packed.key.samples == packed.key.tokens or not all_positions
                found = self.steps.start(packed).logits if samples else self.steps.logits(packed)
                assert found is not None
                if all_positions:
                    after, first = found.numpy()[:, 0], 0
                    for row, fed, many in parts:
                        logits[row, fed : fed + many] = after[first : first + many]
                        first += many
                elif ended := _ended(parts, rows):
                    logits[ended, 0] = found.numpy()[: len(ended), 0]
        return logits

    def sample_after(self, rows: Rows, policy: Array, repeats: int = 1) -> Array:
        self._check(rows.slots, rows.start)
        count = len(rows.tokens)
        tokens = np.full(count * repeats, NOTHING)
        with self.guarded():
            for parts, packed in self._packed(rows, policy[:count]):
                started = self.steps.start(packed)
                if ended := _ended(parts, rows):
                    tokens[ended] = started.tokens.numpy()[: len(ended)]
        self.repeat(count, repeats)
        if repeats > 1:  # the other slots sample after the last token of their prompt, too
            last, end, real = [row[-1:] for row in rows.tokens], rows.end - 1, np.ones((count, 1), bool)
            for first in range(count, count * repeats, count):
                again = Rows(last, end, real, np.arange(first, first + count))
                tokens[first : first + count] = self.sample_after(again, policy[first : first + count])
        return tokens

    def layerwise(self, ids: Array, start: int, end: int) -> tuple[Built, Array]:
        count, pages = len(ids), self.programs.pages
        size = min(key.tokens for key in self.steps.keys if key.tokens >= count)
        tokens, segment = np.zeros(size, TOKEN), np.zeros(1, sequence_row(self.programs.cache, pages))
        [table] = self.given(0, start, start + count).tables
        tokens["id"][:count], tokens["position"][:count], tokens["end"][:count] = ids, start + np.arange(count), end
        segment["count"], segment["start"], segment["of_prompt"] = count, start, count > 1
        segment["pages"].reshape(-1, pages)[:, : len(table)] = on_devices(table)
        return self.store.parts(LayerKey(size, pages)), joined(tokens, segment)

    def leave(self, slot: int, end: int) -> None:
        self.filled[slot] = min(self.filled[slot], end)

    def reorder(self, source: Array) -> None:
        before = [self.tables[slot] if slot >= 0 else [] for slot in source]
        for table in before:
            self.pool.take(table)
        for table in self.tables:
            self.pool.release(table)
        self.tables = [[*table] for table in before]
        self.filled = np.where(source < 0, 0, self.filled[source])
        self.later = np.where(source < 0, 0, self.later[source])
        self.redirect(np.where(source < 0, np.arange(self.slots), source))  # a cleared slot keeps its source
        self.version += 1

    def _check(self, slots: Sequence[int] | Array, starts: Sequence[int] | Array) -> None:
        """Raise InputError for a gap, and for a slot without a source if there is an encoder."""
        self.memory.check(np.array(slots))
        for slot, start in zip(slots, starts, strict=True):
            if start > self.filled[slot]:
                raise gap(int(slot), int(start), int(self.filled[slot]))

    def _packed(self, rows: Rows, policy: Array, every: bool = False) -> Iterator[tuple[list[Part], PackedTokens]]:
        """Divide rows into steps, which sample after each row by its policy. Yield each with its parts of the rows.

        With `every`, short steps sample after all tokens.
        """
        each = zip(rows.tokens, rows.start, rows.end, rows.slots, policy, strict=True)
        works = [self._work(*row, rows.pictured(number)) for number, row in enumerate(each)]
        most = self._most_of_all if every else self.steps.most_tokens
        lengths = sorted(enumerate(map(len, rows.tokens)), key=lambda row: row[1] > 1)  # single tokens first
        for parts in in_steps(lengths, most):
            tokens = sum(part.many for part in parts)
            whole = every and any(key.samples == key.tokens >= tokens for key in self.steps.keys)
            step = [_part(works[part.row], part, whole) for part in parts]
            yield parts, self.steps.pack(step)

    def _work(
        self, tokens: Array, start: int, end: int, slot: int, policy: Array, prompt: Pictured | None
    ) -> Work:  # fmt: skip
        """Return the work that computes all tokens of a row, and samples."""
        params = _params(penalty_of(policy))
        request = Request(int(slot), [NOTHING] * int(start) + tokens.tolist(), params, rules=policy)
        request.pictured = self.pictured(int(slot), int(start), prompt)
        if len(tokens) == 1:
            request.prompt_length = int(start)  # it continues a sequence, as a generated token does
        (request.tables, request.places), request.pending = self.given(int(slot), int(start), int(end)), 1
        return Work(request, int(start), len(tokens), 1)


def decoder_of(family: Family, config: DecoderConfig, runtime: Runtime, options: CompileOptions) -> Decoder:
    """Make the decoder of a model, over pages or blocks where that can be.

    Slots are over pages if a kernel reads these, and programs have all layers, without states.
    """
    made = family, config, runtime, options
    if options.blocks is not None:
        return BlockDecoder(*made)
    devices = runtime.device_count, runtime.panels, runtime.attends_in_place, runtime.scatters
    programs = Programs(family, config, options, *devices)
    whole = options.unroll is None and options.context_unroll is None
    paged = runtime.pages and programs.reads_pages and whole and not programs.cache.has_states
    return PagedDecoder(*made) if paged else SlotDecoder(*made)


@lru_cache
def _params(penalty: float) -> SamplingParams:
    return SamplingParams(repetition_penalty=penalty)  # it checks all parameters, which takes as long as all else


def _sizes(options: CompileOptions) -> list[int]:
    """Return the numbers of prompt tokens of a step: those that a program takes, and more for several prompts."""
    sizes = [*options.buckets.context]
    while sizes and 2 * sizes[-1] <= min(MOST_TOKENS, options.prompt_batch_size * options.buckets.context[-1]):
        sizes.append(2 * sizes[-1])
    return sizes


def _ended(parts: list[Part], rows: Rows) -> list[int]:
    """Return the rows that a step computes to their end."""
    return [row for row, fed, many in parts if fed + many == len(rows.tokens[row])]


def _part(work: Work, part: Part, every: bool) -> Work:
    """Return a part of the work of a row. It samples after its last token, or after `every` token of the part."""
    last = part.fed + part.many == work.count
    return Work(work.request, work.start + part.fed, part.many, part.many if every else int(last))
