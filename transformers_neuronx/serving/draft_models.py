"""Draft tokens from a smaller model, which computes what it misses of a sequence when it drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

import numpy as np

from transformers_neuronx.engine.decoder import Decoder
from transformers_neuronx.engine.loading import Progress
from transformers_neuronx.errors import ConfigError
from transformers_neuronx.runtimes.base import DeviceTensor
from transformers_neuronx.serving.choices import sampled_rows
from transformers_neuronx.serving.guesses import Guesser
from transformers_neuronx.serving.kv_cache import Copy, KVCache
from transformers_neuronx.serving.limits import Limits
from transformers_neuronx.serving.paged import PackedTokens, steps_over
from transformers_neuronx.serving.pages import NO_PAGE
from transformers_neuronx.serving.scheduler import Work
from transformers_neuronx.serving.step_times import StepTimes
from transformers_neuronx.serving.step_writer import TOKEN
from transformers_neuronx.serving.steps import smallest

Array = np.ndarray[Any, Any]


class Computed:
    """How many positions of each page a draft model has computed, from the page's first on: those after them hold
    nothing, or tokens that are no longer in the sequence.
    """

    def __init__(self, count: int, size: int) -> None:
        """`count` pages of `size` positions."""
        self.size = size
        self._known = [size, *[0] * count]  # nothing is missed of what has no page: no token reads it any more

    def end(self, table: Sequence[int], most: int) -> int:
        """Return how many positions are computed of a sequence with these pages, up to the first that is not."""
        known, size = self._known, self.size
        gap = next((place for place, page in enumerate(table) if known[page] < size), len(table))
        return min(most, gap * size + (known[table[gap]] if gap < len(table) else 0))

    def note(self, table: Sequence[int], start: int, end: int, computed: int) -> None:
        """Take note that positions from `start` up to `end` have new tokens, the first `computed` of which it knows."""
        size, known = self.size, self._known
        for place in range(start // size, -(-end // size)):
            page, first = table[place], place * size
            if page != NO_PAGE and known[page] >= start - first:
                known[page] = min(max(start + computed - first, 0), size)

    def copy(self, pages: tuple[int, int]) -> None:
        """Take note that a page becomes a copy: from, to."""
        source, target = pages
        self._known[target] = self._known[source]


class ModelGuesser(Guesser):
    """Draft tokens from a smaller model, with the rules and random numbers of each request.

    Its cache has the target's pages. While requests get draft tokens, it computes prompts as the target does. Otherwise
    it computes nothing of a sequence until it drafts for it. Then it computes what is missing, at most a step of tokens
    at a time, and drafts for the requests of which it knows all.
    """

    def __init__(self, decoder: Decoder, cache: KVCache, limits: Limits) -> None:
        self._steps, self._guesses = steps_over(decoder, cache, limits, adjustments=False), limits.guesses
        self._pool = min(self._steps.pools, key=lambda pool: cache.pools[pool].window is not None)
        self._pages = cache.pools[self._pool].count, cache.size
        self._computed = Computed(*self._pages)
        self._drafts = True  # whether running rows got draft tokens when there were some last
        self._prompts: PackedTokens | None = None  # those of the target's step

    @property
    def programs(self) -> int:
        return self._steps.programs

    def compile(self, progress: Progress) -> None:
        self._steps.compile(progress)

    def seconds(self) -> float:
        return StepTimes(self._steps).one_round() * self._guesses

    def guess(self, works: Sequence[Work]) -> Sequence[list[int] | None]:
        self._catch_up(works)
        ready = [work for work in works if self._end(work, _last(work)) == _last(work)]
        drafts = self._next(ready).numpy().tolist() if ready else []
        found = {work.request.id: tokens for work, tokens in zip(ready, drafts, strict=False)}
        return [
            list(takewhile(lambda token: token >= 0, found[work.request.id])) if work.request.id in found else None
            for work in works
        ]

    def plan(self, step: Sequence[Work]) -> None:
        """Take note of new tokens. If there are draft tokens, all were computed but the last one."""
        if running := [work for work in step if work.samples and not work.of_prompt]:
            self._drafts = any(work.guesses for work in running)
        for work in step:
            self._note(work, work.count - 1 if work.guesses else 0)
        prompts = [work for work in step if work.of_prompt and not work.pools] if self._drafts else []
        known = [work for work in prompts if self._end(work, work.start) == work.start]
        self._prompts = self._packed(known) if known else None

    def follow(self, step: Sequence[Work], started: Any) -> None:
        if self._prompts:
            self._steps.start(self._prompts)

    def copy(self, copies: Sequence[Copy]) -> None:
        self._steps.copy(copies)
        for pairs in copies:
            self._computed.copy(pairs[self._pool])

    def reset(self) -> None:
        self._steps.reset()
        self._computed, self._prompts = Computed(*self._pages), None

    def _end(self, work: Work, most: int) -> int:
        """Return how many of the first tokens of a work's sequence are computed."""
        return self._computed.end(work.request.tables[self._pool], most)

    def _note(self, work: Work, computed: int) -> None:
        """Take note that a work's tokens are new, the first `computed` of which it knows."""
        end = work.start + max(work.count, work.rounds)
        self._computed.note(work.request.tables[self._pool], work.start, end, computed)

    def _packed(self, step: Sequence[Work]) -> PackedTokens:
        """Take note that tokens are computed, and bring them into the form of a program that samples nothing."""
        for work in step:
            self._note(work, work.count)
        return self._steps.pack([replace(work, samples=0, scored=0) for work in step])

    def _catch_up(self, works: Sequence[Work]) -> None:
        """Compute tokens that are missing in one step, as far as there is room: first where the fewest are."""
        missing = [(work.request, (end := self._end(work, _last(work))), _last(work) - end) for work in works]
        step, room = [], self._steps.most_tokens
        for request, start, count in sorted(missing, key=lambda each: each[2]):
            if start < request.prompt_length:  # its tokens are not computed together with those after them
                count = min(count, request.prompt_length - start)
            if count := min(count, room):
                step.append(Work(request, start, count, samples=0))
                room -= count
        self.behind = sum(work.count for work in step) > len(works)
        if step:
            self._steps.start(self._packed(step))

    def _next(self, works: Sequence[Work]) -> DeviceTensor:
        """Feed each request's last token, and then what is guessed. Return the tokens of all rounds, s32[·, rounds]."""
        steps = self._steps
        key = smallest(steps.keys, len(works), len(works))
        tokens, segments = np.zeros(key.tokens, TOKEN), steps.segments(key)
        requests, count = [work.request for work in works], len(works)
        start = np.array([_last(work) for work in works])
        tokens["id"][:count], tokens["chosen"] = [request.tokens[-1] for request in requests], -1
        tokens["position"][:count], tokens["end"][:count] = start, start + 1
        segments["first"][:count], segments["start"][:count] = np.arange(count), start
        segments["count"][:count] = 1
        steps.place(segments, requests, [False] * count)
        samples = sampled_rows(requests, start + 1, key.samples, range(count))
        samples["left"][:count] = [work.guesses for work in works]
        rounds = steps.start(PackedTokens(key, tokens, segments, samples, [], seen=steps.seen(key, requests))).rounds
        assert rounds is not None
        return rounds


def _last(work: Work) -> int:
    """Return the position of a work's last token, after which draft tokens come."""
    return work.start + work.count - work.guesses - 1


def want_fitting(draft: Any, model: Any, limits: Limits) -> None:
    """Raise ConfigError if a model that makes draft tokens does not fit another."""
    if draft.family.images:
        raise ConfigError(f"{draft.tag}: a draft reads text alone: load it with NeuronAutoModelForCausalLM")
    decoder, paged = draft.decoder, model.decoder.programs.reads_pages
    if decoder.config.vocab_size != model.decoder.config.vocab_size:
        sizes = f"{model.decoder.config.vocab_size}, got {decoder.config.vocab_size}"
        raise ConfigError(f"{draft.tag}: a draft must have the vocabulary of {model.tag}: {sizes}")
    if decoder.programs.cache.has_states:
        raise ConfigError(
            f"{draft.tag} keeps states of sequences, so it cannot be a draft: wrong tokens would stay in them"
        )
    if decoder.memory.layout or (paged and not decoder.programs.reads_pages):
        raise ConfigError(f"{draft.tag}: a draft must be a decoder whose cache can be in pages")
    if not paged and decoder.slots < model.decoder.slots:
        raise ConfigError(
            f"{draft.tag}: batch_size of a draft must be at least {model.decoder.slots}, got {decoder.slots}"
        )
    if (longest := decoder.options.buckets.longest) < limits.positions:
        raise ConfigError(f"{draft.tag}: n_positions of a draft must be at least {limits.positions}, got {longest}")
