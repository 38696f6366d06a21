"""Runs an engine's steps over pages: its programs, and the cache on the devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from transformers_neuronx.engine.adapters import DeviceAdapters
from transformers_neuronx.engine.decoder import Decoder
from transformers_neuronx.engine.encoding import SourceMemory
from transformers_neuronx.engine.keys import ProgramKey
from transformers_neuronx.engine.loading import Progress
from transformers_neuronx.engine.store import ProgramStore
from transformers_neuronx.layers.rows import joined
from transformers_neuronx.runtimes.base import DeviceTensor
from transformers_neuronx.serving.adapters import HostAdapter
from transformers_neuronx.serving.choices import (
    Changes,
    Chooser,
    Chosen,
    Scored,
    sampled_rows,
    scored_of,
    seen_by,
)
from transformers_neuronx.serving.kv_cache import Copy, KVCache
from transformers_neuronx.serving.limits import Limits
from transformers_neuronx.serving.pages import NO_PAGE
from transformers_neuronx.serving.pooling import PoolKey, shares_of
from transformers_neuronx.serving.request import Request
from transformers_neuronx.serving.scheduler import Work
from transformers_neuronx.serving.step_writer import LOGITS, TOKEN, Sizes, sequence_row
from transformers_neuronx.serving.steps import CopyKey, TokensKey, all_logits, keys_of, smallest
from transformers_neuronx.weights.lora import AdapterLayout

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class PackedTokens:
    """A step in the form of its program: rows of tokens, sequences and samples, see `steps`."""

    key: TokensKey
    tokens: Array  # TOKEN
    segments: Array  # sequence_row
    samples: Array  # SAMPLED
    requests: list[Request]  # those that sample, once for each sample
    scored: Sequence[Scored] = ()  # after the samples
    seen: Array | None = None  # the tokens that each one's sequence has, pred[samples, vocab], if rules depend on them
    pools: Sequence[Work] = ()  # those whose last hidden states are summed
    shares: Array | None = None  # how often each one's sum has each token, f32[sequences, tokens]
    placed: Sequence[Array] = ()  # what stands in place of tokens, if anything does


class Started(NamedTuple):
    """A step that was started: last tokens, those of all rounds, logits, hidden states, and features, as far as it has
    them.
    """

    packed: PackedTokens
    tokens: DeviceTensor
    rounds: DeviceTensor | None
    logits: DeviceTensor | None
    hidden: DeviceTensor | None
    features: DeviceTensor | None


class PagedSteps:
    """The steps of one model over pages, for one thread: `pack`, `start`, and once the last one was read, `choose`.

    `store` has the programs for the layout of its cache, and `pools` says which tables of a sequence are those for
    each window of the layout. `memory` has what the model's encoder has read, if there is one. If it `overlaps`, a step
    may start before the tokens of the one before are read. With `adjustments`, logits may change before tokens are
    chosen.
    """

    def __init__(
        self, decoder: Decoder, store: ProgramStore, memory: SourceMemory, keys: Sequence[TokensKey],
        pools: Sequence[int], overlaps: bool, adjustments: bool,
    ) -> None:  # fmt: skip
        self.decoder, self.store, self.keys, self.overlaps = decoder, store, list(keys), overlaps
        self.layout, self.pools = store.programs.cache, pools
        self.page = next(iter(self.layout.kinds.values())).positions  # positions of a page
        self._row = sequence_row(self.layout, self.keys[0].pages)
        self.memory = memory
        self.adapters = DeviceAdapters(decoder.runtime, store)
        self.chooser = Chooser(decoder, sorted({key.samples for key in self.keys} - {0}), adjustments)
        self.pool_keys = [PoolKey(key.tokens, key.sequences) for key in self.keys if key.hidden]
        self.caches: list[DeviceTensor] = []
        self._seen: dict[int, DeviceTensor] = {}  # by the number of samples

    @property
    def embeds(self) -> bool:
        """Whether it can pool hidden states."""
        return bool(self.pool_keys)

    @property
    def programs(self) -> int:
        """Number of programs that `compile` compiles."""
        return len(self._own()) + len(self.chooser.keys)

    def _own(self) -> list[ProgramKey]:
        """The programs of the store."""
        return [*self.keys, *self.pool_keys, CopyKey(), *self.memory.keys(), *self.adapters.keys()]

    def compile(self, progress: Progress) -> None:
        """Compile all programs. `progress` is called with the name of each."""
        self.store.compile(self._own(), progress)
        self.chooser.compile(progress)

    @property
    def most_tokens(self) -> int:
        """The most tokens of a step."""
        return max(key.tokens for key in self.keys)

    def most_samples(self) -> int:
        """Return the most tokens of a step after which it has logits."""
        return self.chooser.most

    def forget(self) -> None:
        """Forget the last step."""
        self._seen.clear()
        self._steady: PackedTokens | None = None  # the last step, if each work of it goes on
        self._noted: tuple[int, list[Request]] = (0, [])  # samples of the last step, and whose tokens are known there
        self._before = self.chooser.none()

    def reset(self) -> None:
        """Fill the cache with zeros, and the places of adapters."""
        self.forget()
        self.decoder.tower.reset()
        self.caches[:] = [self.decoder.runtime.put([zeros]) for zeros in self.layout.zeros()]
        self.memory.reset()
        self.adapters.reset()

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copy pages of the cache, in order."""
        for pairs in copies:
            own = np.stack([on_devices(pairs[pool]) for pool in self.pools])
            [(_, program)] = self.store.parts(CopyKey())
            self.caches[:] = program(self.decoder.runtime.put([own]), *self.caches)

    def load(self, adapters: Sequence[HostAdapter]) -> None:
        """Bring adapters to their places on the devices."""
        for adapter in adapters:
            assert adapter.place is not None
            self.adapters.load(adapter.place, adapter.content)

    def encode(self, requests: Sequence[Request]) -> None:
        """Encode the sources of requests, each to the first of its places."""
        for request in requests:
            self.memory.encode([request.source], np.array(request.places[:1]))

    def segments(self, key: Sizes) -> Array:
        """Return rows of no sequence."""
        return np.zeros(key.sequences, self._row)

    def place(self, segments: Array, requests: Sequence[Request], keeps: Sequence[bool]) -> None:
        """Fill rows with where requests have their cache. One that `keeps` its states writes new ones elsewhere."""
        count = len(requests)
        for number, pool in enumerate(self.pools):
            tables = [request.tables[pool] for request in requests]
            longest = max(map(len, tables), default=0)
            even = [[*table, *[NO_PAGE] * (longest - len(table))] for table in tables]
            segments["pages"].reshape(len(segments), len(self.pools), -1)[:count, number, :longest] = on_devices(even)
        if self.layout.has_places:
            both = [(each.places[0], each.places[-1]) for each in requests]
            segments["places"][:count] = [
                (old, new if keep else old) for (old, new), keep in zip(both, keeps, strict=True)
            ]

    def pack(self, step: Sequence[Work]) -> PackedTokens:
        """Bring a step into the form of its program."""
        steady, before = all(work.goes_on for work in step), self._steady
        packed = (self._next_of(before, step) if steady and before else None) or self._packed(step)
        self._steady = packed if steady and not packed.placed else None
        return packed

    def _next_of(self, before: PackedTokens, step: Sequence[Work]) -> PackedTokens | None:
        """Return a step that differs from the one `before` in that each sequence is one token further on: that is most
        steps, and takes a fraction of the time. None if it differs in more.
        """
        count, requests = len(step), [work.request for work in step]
        if requests != before.requests:
            return None
        tokens, segments, samples = (rows.copy() for rows in (before.tokens, before.segments, before.samples))
        segments["start"][:count] += 1
        start = segments["start"][:count]
        if start.tolist() != [work.start for work in step]:
            return None
        tokens["id"], tokens["chosen"][:count] = 0, np.arange(count)
        tokens["position"][:count] += 1
        tokens["end"][:count] += 1
        samples["position"][:count] += 1
        for row in np.flatnonzero(start % self.page == 0).tolist():  # those that begin a page
            self.place(segments[row : row + 1], requests[row : row + 1], [False])
        return replace(before, tokens=tokens, segments=segments, samples=samples, seen=self.seen(before.key, requests))

    def _packed(self, step: Sequence[Work]) -> PackedTokens:
        """Bring any step into the form of its program."""
        requests = [work.request for work in step for _ in range(work.samples)]
        scored, pools = scored_of(step), [work for work in step if work.pools]
        numbers = [(work.start, work.count, work.samples, work.request.prompt_length) for work in step]
        start, number, samples, lengths = np.array(numbers).T
        first, count = np.cumsum(number) - number, len(step)
        key = smallest(self.keys, int(number.sum()), len(requests) + len(scored), bool(pools))
        segments = self.segments(key)
        for name, values in dict(first=first, count=number, start=start, of_prompt=start < lengths).items():
            segments[name][:count] = values
        self.place(segments, [work.request for work in step], [work.guesses > 0 for work in step])
        tokens = _tokens(key.tokens, step, number, start, lengths)
        for row, request in enumerate(requests):
            request.row = row
        after = _ranges(first + number - samples, samples)
        positions = tokens["position"][after] + 1
        if scored:
            after = np.append(after, _ranges(first, np.array([work.scored for work in step])))
        rows = sampled_rows(requests, positions, key.samples, after)
        if any(work.rounds > 1 for work in step):
            rows["left"][: len(step)] = [work.rounds for work in step]
            for row, request in zip(rows["eos"], requests, strict=False):
                some = sorted(request.ends)[: len(row)]  # the host knows the others
                row[: len(some)] = some
        shares, placed = shares_of(key, step, first) if pools else None, self.placed(key.tokens, step)
        seen = self.seen(key, requests)
        return PackedTokens(key, tokens, segments, rows, requests, scored, seen, pools, shares, placed)

    def placed(self, size: int, step: Sequence[Work]) -> list[Array]:
        """Return what stands in place of some of `size` tokens; nothing if none is of a request with images."""
        bounds = accumulate((work.count for work in step), initial=0)
        works = zip(bounds, step, strict=False)
        return self.decoder.tower.placed(size, 1, ((at, w.start, w.count, w.request.pictured) for at, w in works))

    def seen(self, key: TokensKey, requests: Sequence[Request]) -> Array | None:
        """Return the tokens that sequences have, pred[samples, vocab], if the rules of a request depend on them.

        A step adds the tokens that it computes, so there is nothing to tell if the same requests sampled in the one
        before.
        """
        before, self._noted = self._noted, (key.samples, [*requests])
        if not any(request.penalizes for request in requests):
            self._noted = (0, [])
        elif self._noted != before:
            if any(request.guesses for request in requests):
                self._noted = (0, [])  # it also adds wrong draft tokens
            return seen_by(requests, key.samples, self.decoder.config.vocab_size)
        return None

    def start(self, packed: PackedTokens) -> Started:
        """Start a step. Returns before its results are there."""
        count, seen = packed.key.samples, []
        if count:
            if packed.seen is not None or count not in self._seen:
                none = np.zeros((count, self.decoder.config.vocab_size), bool)
                self._seen[count] = self.decoder.runtime.put([none if packed.seen is None else packed.seen])
            seen = [self._seen[count]]
        before = [self._before] * bool(packed.key.chosen)
        results = self._results(packed.key, packed, packed.samples, *before, *seen)
        tokens = next(results)
        rounds = next(results) if packed.key.rounds else None
        logits = next(results) if count else None
        if count:
            self._seen[count] = next(results)
        hidden = next(results) if packed.key.hidden else None
        features = next(results) if packed.key.features else None
        self.caches[:] = results
        return Started(packed, tokens, rounds, logits, hidden, features)

    def logits(self, packed: PackedTokens) -> DeviceTensor:
        """Start a step that samples nothing. Return the logits after all of its tokens, f32[tokens, 1, vocab]."""
        key = all_logits(packed.key)
        every = np.zeros(key.tokens, LOGITS)
        every["token"] = np.arange(key.tokens)
        logits, *self.caches[:] = self._results(key, packed, every)
        return logits

    def _results(
        self, key: ProgramKey, packed: PackedTokens, wanted: Array, *operands: DeviceTensor
    ) -> Iterator[DeviceTensor]:
        """Run a program of a step, where something is `wanted` of some tokens."""
        rows = self.decoder.runtime.put([joined(packed.tokens, packed.segments, wanted)])
        [(_, program)] = self.store.parts(key)
        weights = self.decoder.operands(range(self.decoder.config.n_layer), memory=self.memory)
        placed = self.decoder.tower.put(packed.key.tokens, 1, packed.placed)
        return iter(program(rows, *operands, *self.caches, *weights, *self.adapters.arrays, *placed))

    def changes(self, packed: PackedTokens) -> Changes | None:
        """Return how logits change before tokens are chosen, if they do. All tokens before must be known."""
        if not any(request.adjusts for request in packed.requests):
            return None
        return Changes.of(packed.requests, packed.key.samples, self.decoder.config.vocab_size)

    def choose(self, started: Started, changes: Changes | None) -> Chosen:
        """Return the tokens of the step that was started last, before they are there."""
        packed, tokens, rounds, logits, hidden, _ = started
        if logits is None:
            chosen = Chosen([], tokens)
        else:
            self._before = self.chooser.choose(logits, packed.samples, changes) if changes else tokens
            rounds = None if changes else rounds
            chosen = self.chooser.chosen(packed.requests, self._before, logits, rounds, packed.scored)
        if packed.shares is not None and hidden is not None:
            chosen.pooled = packed.pools, self._sums(packed.shares, hidden)
        return chosen

    def _sums(self, shares: Array, hidden: DeviceTensor) -> DeviceTensor:
        """Return sums of last hidden states, f32[·, h], given how often each has each token."""
        sums, tokens = shares.shape
        [(_, program)] = self.store.parts(PoolKey(tokens, sums))
        [result] = program(self.decoder.runtime.put([shares]), hidden, *self.decoder.operands(range(0)))
        return result


def on_devices(table: Sequence[int] | Sequence[Sequence[int]]) -> Array:
    """Return pages as programs count them, from 0 on. What stands for NO_PAGE is never read."""
    return np.maximum(np.array(table, np.int32) - 1, 0)


def _ranges(first: Array, count: Array) -> Array:
    """Return `count[i]` numbers from `first[i]` on, for each i, s64[·]."""
    before = np.cumsum(count) - count
    return np.repeat(first - before, count) + np.arange(count.sum())


def _tokens(size: int, step: Sequence[Work], number: Array, start: Array, lengths: Array) -> Array:
    """Return so many rows of `TOKEN`, with the tokens of a step: of each work a `number`, from position `start` on."""
    ids: list[int] = []
    for work in step:
        ids += (known := work.tokens)
        if len(known) < work.count:  # only the devices know its last token
            ids.append(~work.request.row)
    known_or_row, positions = np.array(ids), _ranges(start, number)
    chosen = np.maximum(~known_or_row, -1)
    ends = np.maximum(np.repeat(lengths, number), positions + 1)  # as `Work.end`, for each token
    rows = np.zeros(size, TOKEN)
    rows["chosen"] = rows["adapter"] = -1
    if any(work.request.adapter for work in step):
        places = [work.request.adapter.place if work.request.adapter else -1 for work in step]
        rows["adapter"][: len(ids)] = np.repeat(np.array(places, np.int32), number)
    for name, values in dict(id=np.maximum(known_or_row, 0), position=positions, end=ends, chosen=chosen).items():
        rows[name][: len(ids)] = values
    return rows


def steps_over(
    decoder: Decoder, cache: KVCache, limits: Limits, adjustments: bool, adapters: AdapterLayout | None = None,
    features: tuple[int, ...] = (), overlaps: bool = False,
) -> PagedSteps:  # fmt: skip
    """Return the steps of a model over a cache of its own, for an engine with these limits, maybe with adapters, and
    with features: see `Programs.over`.
    """
    windows = [pool.window for pool in cache.pools]
    counts = {pool.window: pool.count for pool in cache.pools}
    layout = decoder.programs.cache.paged(cache.size, counts, len(cache.free_places) + 1)
    hidden = adjustments and not layout.memory  # those that embeddings are made of
    keys = keys_of(limits.tokens, limits.rows, -(-limits.positions // cache.size), limits.guesses, hidden)
    keys = [replace(key, features=bool(features)) for key in keys]
    pools = [windows.index(window) for window in layout.windows]  # those that this model uses
    store = decoder.store.over(layout, adapters, features)
    memory = SourceMemory(decoder.runtime, store, decoder.weights, rows=1)
    steps = PagedSteps(decoder, store, memory, keys, pools, overlaps, adjustments)
    steps.reset()
    return steps
