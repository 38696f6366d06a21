"""Draft tokens of requests, from their own text or from a smaller model. A step of the target verifies them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, Protocol

import numpy as np

from transformers_neuronx.engine.decoder import Decoder
from transformers_neuronx.engine.loading import Progress
from transformers_neuronx.errors import ConfigError
from transformers_neuronx.runtimes.base import DeviceTensor
from transformers_neuronx.serving.choices import sampled_rows
from transformers_neuronx.serving.kv_cache import Copy, KVCache
from transformers_neuronx.serving.limits import Limits
from transformers_neuronx.serving.paged import PackedTokens, Started, steps_over
from transformers_neuronx.serving.scheduler import Work
from transformers_neuronx.serving.step_times import StepTimes
from transformers_neuronx.serving.step_writer import TOKEN
from transformers_neuronx.serving.steps import smallest

Array = np.ndarray[Any, Any]


class Compiled(Protocol):
    """What has programs."""

    @property
    def programs(self) -> int:
        """Number of programs that `compile` compiles."""
        ...

    def compile(self, progress: Progress) -> None:
        """Compile all programs. `progress` is called with the name of each."""
        ...


class Guesser(Compiled, Protocol):
    """Makes draft tokens. It sees each step of the target, in order."""

    def guess(self, works: Sequence[Work]) -> list[list[int]]:
        """Return draft tokens for each of these works: at most as many as it has room for."""
        ...

    def seconds(self) -> float:
        """Measure how long it takes to make draft tokens for a step."""
        ...

    def copy(self, copies: Sequence[Copy]) -> None:
        """See the pages that are copied next."""
        ...

    def follow(self, step: Sequence[Work], started: Any) -> None:
        """See the step that the target has started."""
        ...

    def reset(self) -> None:
        """Forget all sequences."""
        ...


def with_guesses(step: Sequence[Work], guesser: Guesser) -> list[Work]:
    """Fill the room for draft tokens in a step, and return the step with the room that is used."""
    drafting = [work for work in step if work.guesses]
    found = {work.request.id: tokens for work, tokens in zip(drafting, guesser.guess(drafting), strict=True)}
    for work in drafting:
        work.request.guesses = found[work.request.id]
    return [work.with_guesses(len(found.get(work.request.id, []))) for work in step]


@dataclass(frozen=True)
class PromptLookup:
    """Draft tokens without a model: the end of a text is searched for earlier in it, and what followed is proposed.

    - `ngram`: number of last tokens to search for; fewer are tried if these do not occur earlier. Default 3.
    """

    ngram: int = 3

    def find(self, tokens: Sequence[int], count: int) -> list[int]:
        """Return up to `count` tokens that may follow; none if nothing earlier matches."""
        ids = np.asarray(tokens)
        for size in range(min(self.ngram, len(ids) - 1), 0, -1):
            windows = np.lib.stride_tricks.sliding_window_view(ids[:-1], size)
            found = np.flatnonzero((windows == ids[-size:]).all(1))
            if found.size:
                after: list[int] = ids[found[-1] + size :][:count].tolist()
                return after
        return []


class TextGuesser:
    """Draft tokens from each request's own text."""

    programs = 0

    def __init__(self, lookup: PromptLookup) -> None:
        self._lookup = lookup

    def compile(self, progress: Progress) -> None:
        """Do nothing."""

    def guess(self, works: Sequence[Work]) -> list[list[int]]:
        return [self._lookup.find(work.request.tokens, work.guesses) for work in works]

    def seconds(self) -> float:
        """Return none: it takes none of the devices' time."""
        return 0.0

    def copy(self, copies: Sequence[Copy]) -> None:
        """Do nothing."""

    def follow(self, step: Sequence[Work], started: Any) -> None:
        """Do nothing."""

    def reset(self) -> None:
        """Do nothing."""


class ModelGuesser:
    """Draft tokens from a smaller model, with the rules and random numbers of each request.

    Its cache has the target's pages: it computes each step that the target computes, so a page holds the same tokens
    for both. What it writes for a draft token that was wrong is written again later.
    """

    def __init__(self, decoder: Decoder, cache: KVCache, limits: Limits) -> None:
        self._steps, self._guesses = steps_over(decoder, cache, limits, adjustments=False), limits.guesses

    @property
    def programs(self) -> int:
        return self._steps.programs

    def compile(self, progress: Progress) -> None:
        self._steps.compile(progress)

    def guess(self, works: Sequence[Work]) -> list[list[int]]:
        if not any(work.guesses for work in works):
            return [[] for _ in works]
        found = self._next(works).numpy().tolist()
        return [list(takewhile(lambda token: token >= 0, tokens)) for _, tokens in zip(works, found, strict=False)]

    def _next(self, works: Sequence[Work]) -> DeviceTensor:
        """Feed each request's last token, and then what is guessed. Return the tokens of all rounds, s32[·, rounds]."""
        steps = self._steps
        key = smallest(steps.keys, len(works), len(works))
        tokens, segments = np.zeros(key.tokens, TOKEN), steps.segments(key)
        requests, count = [work.request for work in works], len(works)
        start = np.array([work.start for work in works])
        tokens["id"][:count], tokens["chosen"] = [request.tokens[-1] for request in requests], -1
        tokens["position"][:count], tokens["end"][:count] = start, start + 1
        segments["first"][:count], segments["start"][:count] = np.arange(count), start
        segments["count"][:count] = [work.guesses > 0 for work in works]
        steps.place(segments, requests, [False] * count)
        samples = sampled_rows(requests, start + 1, key.samples, range(count))
        samples["left"][:count] = [work.guesses for work in works]
        rounds = steps.start(PackedTokens(key, tokens, segments, samples, [], seen=steps.seen(key, requests))).rounds
        assert rounds is not None
        return rounds

    def seconds(self) -> float:
        return StepTimes(self._steps).one_round() * self._guesses

    def copy(self, copies: Sequence[Copy]) -> None:
        self._steps.copy(copies)

    def follow(self, step: Sequence[Work], started: Started) -> None:
        self._steps.start(replace(started.packed, seen=None))

    def reset(self) -> None:
        self._steps.reset()


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
