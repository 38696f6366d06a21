"""Runs steps where attention cannot read pages: a page is a slot of the model's own cache.

The work of a step goes to the model's own programs: rectangles of prompts' tokens, single tokens of rows, the loop over
tokens, and the verification of draft tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from transformers_neuronx.engine.decoder import Decoder
from transformers_neuronx.engine.inputs import Rows
from transformers_neuronx.engine.keys import ProgramKey
from transformers_neuronx.engine.loading import Progress
from transformers_neuronx.engine.loops import EOS_COLUMNS, LOOP
from transformers_neuronx.engine.rules import GREEDY
from transformers_neuronx.engine.slots import SlotDecoder
from transformers_neuronx.layers.sampling import NOTHING
from transformers_neuronx.runtimes.base import DeviceTensor
from transformers_neuronx.serving.adapters import HostAdapter
from transformers_neuronx.serving.choices import Changes, Chooser, Chosen, Scored, sampled_rows, scored_of
from transformers_neuronx.serving.kv_cache import Copy
from transformers_neuronx.serving.request import Request
from transformers_neuronx.serving.scheduler import Work

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Chunks(Rows):
    """Rows that are a part of their sequences: `ends` are the lengths of the whole ones."""

    ends: Array

    @property
    def end(self) -> Array:
        return self.ends


@dataclass(frozen=True)
class PackedWork:
    """A step, the requests that sample in it, once for each sample, and tokens that are scored."""

    step: list[Work]
    requests: list[Request]
    scored: Sequence[Scored]


class SlotSteps:
    """The steps of one model over its slots, for one thread; nobody else may call the model.

    Running rows may have up to `guesses` draft tokens. With `adjustments`, logits may change before tokens are chosen.
    """

    overlaps = False
    embeds = False

    def __init__(self, decoder: Decoder, guesses: int = 0, adjustments: bool = False) -> None:
        assert isinstance(decoder, SlotDecoder)
        self.decoder, self.guesses = decoder, guesses
        self.chooser = Chooser(decoder, [decoder.slots * (1 + guesses)], adjustments)
        self._noted: set[int] = set()  # requests whose tokens the devices know, and those that they sample

    @property
    def _verifying(self) -> Sequence[ProgramKey]:
        return self.decoder.verifying(self.guesses) if self.guesses else []

    @property
    def programs(self) -> int:
        """Number of programs that `compile` compiles."""
        return len(self.chooser.keys) + len(self._verifying)

    def compile(self, progress: Progress) -> None:
        """Compile the choice of tokens, and verification. The model has all other programs."""
        self.decoder.store.compile(self._verifying, progress)
        self.chooser.compile(progress)

    def longest_prompt(self) -> int:
        """Return the most prompt tokens that one program of the model takes."""
        return max([1, *self.decoder.options.buckets.context])

    def most_samples(self) -> int:
        """Return all tokens that there can be: the host sees the logits of a step."""
        return self.decoder.slots * self.decoder.options.buckets.longest

    def reset(self) -> None:
        """Forget all sequences."""
        self._noted.clear()
        self.decoder.reset()

    def copy(self, copies: Sequence[Copy]) -> None:
        """Do nothing: a page is a whole sequence, so none begins like another."""
        assert not copies

    def load(self, adapters: Sequence[HostAdapter]) -> None:
        assert not adapters

    def encode(self, requests: Sequence[Request]) -> None:
        """Encode the sources of requests, each to its slot."""
        if requests:
            sources = [request.source for request in requests]
            self.decoder.encode(sources, np.array([slot_of(request) for request in requests]))

    def pack(self, step: Sequence[Work]) -> PackedWork:
        """Return the step with the requests that sample."""
        return PackedWork(list(step), [work.request for work in step for _ in range(work.samples)], scored_of(step))

    def start(self, packed: PackedWork) -> PackedWork:
        """Do nothing: the choice of tokens decides which programs run."""
        return packed

    def changes(self, packed: PackedWork) -> Changes | None:
        """Return how logits change before tokens are chosen, if the host must see them."""
        seen = any(request.adjusts or request.params.logprobs is not None for request in packed.requests)
        if not seen and not packed.scored:
            return None
        return Changes.of(packed.requests, self.chooser.most, self.decoder.config.vocab_size)

    def choose(self, packed: PackedWork, changes: Changes | None) -> Chosen:
        """Run a step, and choose tokens."""
        if changes is not None:
            return self._changed(packed, changes)
        step = packed.step
        self._note(step)
        if any(work.rounds > 1 for work in step):
            rows = loop_rows(self.decoder, step, [work.rounds for work in step])
            return Chosen(packed.requests, self.decoder.loop(rows, int(rows["left"].max()))[slots_of(step)])
        tokens = np.full((len(step), 1 + self.guesses), NOTHING)
        verifies = np.array([bool(work.samples) and not work.of_prompt for work in step])
        verifies &= any(work.guesses for work in step)
        for places, run in ((np.flatnonzero(verifies), self._verified), (np.flatnonzero(~verifies), self._sampled)):
            if places.size:
                tokens[places] = run([step[place] for place in places])
        sampling = [place for place, work in enumerate(step) if work.samples]
        return Chosen([step[place].request for place in sampling], tokens[sampling])

    def _note(self, step: Sequence[Work]) -> None:
        """Tell the devices the tokens of requests whose rules depend on them."""
        wanted = {work.request.id for work in step if work.request.penalizes}
        if wanted - self._noted:
            self.decoder.note(seen_in_slots(self.decoder, step))
            self._noted = wanted

    def _changed(self, packed: PackedWork, changes: Changes) -> Chosen:
        """Choose tokens from logits that the host has changed."""
        self._noted.clear()
        step, requests, scored = packed.step, packed.requests, packed.scored
        every = bool(scored) or any(work.guesses for work in step)
        logits = self.decoder.feed(_rows(step), all_positions=every)
        first = [work.count - work.samples if every else 0 for work in step]
        sampled = [row[place : place + work.samples] for row, place, work in zip(logits, first, step, strict=True)]
        put = self._put(np.concatenate(sampled))
        after = [work.start + work.count - left for work in step for left in range(work.samples, 0, -1)]
        rows = sampled_rows(requests, np.array(after) + 1, self.chooser.most)
        tokens = self.chooser.choose(put, rows, changes)
        if scored:
            found = np.concatenate([row[: work.scored] for row, work in zip(logits, step, strict=True)])
            for begin in range(0, len(scored), self.chooser.most):
                some = slice(begin, begin + self.chooser.most)
                self.chooser.chosen([], tokens, self._put(found[some]), scored=scored[some]).read()
        return self.chooser.chosen(requests, tokens, put)

    def _put(self, logits: Array) -> DeviceTensor:
        """Put logits f32[·, vocab] on the devices, as f32[rows, 1, vocab], with zeros after them."""
        rows = np.zeros((self.chooser.most, 1, logits.shape[1]), np.float32)
        rows[: len(logits), 0] = logits
        return self.decoder.runtime.put([rows])

    def _verified(self, works: Sequence[Work]) -> Array:
        """Sample after the last token of each request and after its draft tokens. -> s32[works, 1 + guesses]"""
        slots, most = slots_of(works), 1 + self.guesses
        ids = np.zeros((self.decoder.slots, most), np.int32)
        start, length = np.zeros((2, self.decoder.slots), np.int64)
        for slot, work in zip(slots, works, strict=True):
            ids[slot, : work.count], start[slot], length[slot] = work.tokens, work.start, work.count
        self._noted.clear()  # the devices do not know which draft tokens are right
        tokens = self.decoder.verify(ids, start, length, _policies(self.decoder, works))[slots]
        return np.where(np.arange(most) < length[slots, None], tokens, NOTHING)

    def _sampled(self, works: Sequence[Work]) -> Array:
        """Feed the tokens of requests, and sample the next one of each. -> s64[works, 1]"""
        if not all(work.samples for work in works):
            self._noted.clear()  # the devices take what they sample inside a prompt for a part of it
        policies = np.stack([work.request.policy for work in works])
        return self.decoder.sample_after(_rows(works), policies)[:, None]


def slots_of(works: Sequence[Work]) -> list[int]:
    return [slot_of(work.request) for work in works]


def slot_of(request: Request) -> int:
    return request.tables[0][0] - 1


def _rows(works: Sequence[Work]) -> Chunks:
    """Return the tokens of each request that are computed, as rows."""
    tokens = [np.array(work.tokens, np.int64) for work in works]
    start, ends = np.array([(work.start, work.end) for work in works]).T
    prompts = [work.request.pictured for work in works]
    return Chunks(tokens, start, np.ones((len(works), 1), bool), np.array(slots_of(works)), ends, prompts=prompts)


def seen_in_slots(decoder: SlotDecoder, works: Sequence[Work]) -> Array:
    """Return the tokens that each slot's sequence has, pred[slots, vocab]."""
    seen = np.zeros((decoder.slots, decoder.config.vocab_size), bool)
    for work in works:
        work.request.see(seen[slot_of(work.request)])
    return seen


def _policies(decoder: SlotDecoder, works: Sequence[Work]) -> Array:
    """Return the policy of each slot, s32[slots, POLICY_COLUMNS]."""
    policies = np.tile(GREEDY, (decoder.slots, 1))
    policies[slots_of(works)] = [work.request.policy for work in works]
    return policies


def loop_rows(decoder: SlotDecoder, works: Sequence[Work], left: Sequence[int]) -> Array:
    """Return the rows of a loop that generates up to `left[i]` tokens of each request."""
    rows = np.zeros(decoder.slots, LOOP)
    rows["policy"], rows["eos"] = _policies(decoder, works), -1
    for slot, work, count in zip(slots_of(works), works, left, strict=True):
        rows["token"][slot], rows["position"][slot], rows["left"][slot] = work.request.tokens[-1], work.start, count
        known = sorted(work.request.ends)[:EOS_COLUMNS]  # the host knows the others
        rows["eos"][slot, : len(known)] = known
    return rows
