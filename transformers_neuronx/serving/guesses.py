"""Draft tokens of requests, which a step of the target verifies: what makes them, and those from a request's text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from transformers_neuronx.engine.loading import Progress
from transformers_neuronx.serving.kv_cache import Copy
from transformers_neuronx.serving.scheduler import Work


class Compiled(Protocol):
    """What has programs."""

    @property
    def programs(self) -> int:
        """Number of programs that `compile` compiles."""
        ...

    def compile(self, progress: Progress) -> None:
        """Compile all programs. `progress` is called with the name of each."""
        ...


class Guesser:
    """Makes draft tokens. It sees each step of the target, in order; by default it keeps nothing of them.

    It is `behind` if the last draft tokens took longer than others, as much had to be computed before them.
    """

    behind = False

    @property
    def programs(self) -> int:
        """Number of programs that `compile` compiles."""
        return 0

    def compile(self, progress: Progress) -> None:
        """Compile all programs. `progress` is called with the name of each."""

    def seconds(self) -> float:
        """Measure how long it takes to make draft tokens for a step."""
        return 0.0

    def guess(self, works: Sequence[Work]) -> Sequence[list[int] | None]:
        """Return draft tokens for each of these works: at most as many as it has room for. None if it is not ready to
        make some for this request.
        """
        raise NotImplementedError

    def plan(self, step: Sequence[Work]) -> None:
        """See what the target computes next, after `guess`."""

    def copy(self, copies: Sequence[Copy]) -> None:
        """See the pages that are copied next."""

    def follow(self, step: Sequence[Work], started: Any) -> None:
        """See the step that the target has started."""

    def reset(self) -> None:
        """Forget all sequences."""


def with_guesses(step: Sequence[Work], guesser: Guesser) -> list[Work]:
    """Fill the room for draft tokens in a step, and return the step with the room that is used."""
    drafting = [work for work in step if work.guesses]
    found = {work.request.id: tokens for work, tokens in zip(drafting, guesser.guess(drafting), strict=True)}
    for work in drafting:
        tokens = found[work.request.id]
        work.request.guesses = tokens or []
        work.room = 0 if tokens is None else work.room
    planned = [work.with_guesses(len(found.get(work.request.id) or [])) for work in step]
    guesser.plan(planned)
    return planned


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


class TextGuesser(Guesser):
    """Draft tokens from each request's own text."""

    def __init__(self, lookup: PromptLookup) -> None:
        self._lookup = lookup

    def guess(self, works: Sequence[Work]) -> Sequence[list[int] | None]:
        return [self._lookup.find(work.request.tokens, work.guesses) for work in works]
