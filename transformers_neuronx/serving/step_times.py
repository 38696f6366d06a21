"""How long an engine's steps over pages take."""

from __future__ import annotations

import math
from collections.abc import Callable
from time import perf_counter

import numpy as np

from transformers_neuronx.serving.choices import sampled_rows
from transformers_neuronx.serving.paged import PackedTokens, PagedSteps
from transformers_neuronx.serving.step_writer import ROUNDS, TOKEN
from transformers_neuronx.serving.steps import FEW, TokensKey

SLOWER = 2.5  # a step with a prompt's chunk, beside one of a few rows; the rest is for noise and what rows attend to
FAR = 4096  # positions, at most, of a prompt whose steps are measured
LONG = 0.1  # seconds of two calls, after which a third would tell little more
ROUND_SECONDS = 0.05  # a new request waits so long, at most, for a step that generates several tokens


class StepTimes:
    """Measures steps, once they are compiled."""

    def __init__(self, steps: PagedSteps) -> None:
        self._steps = steps
        self._times: dict[int, float] = {}  # seconds of steps by tokens

    def longest_joined(self) -> tuple[int, float]:
        """Measure steps. Return the most tokens of one that takes at most SLOWER times the time of one of a few rows,
        and the position at which a token of a prompt takes twice the time of one at its beginning.
        """
        few = min(FEW, self._steps.keys[0].chosen)
        some = (
            key for key in self._steps.keys if key.samples in (key.tokens, few) and key.tokens >= few and not key.hidden
        )
        sizes = {key.tokens: key for key in some}
        base, *longer = (sizes[size] for size in sorted(sizes))
        shortest = taken = self._times[base.tokens] = self._of(base)
        most = base
        for key in longer:
            seconds = self._times[key.tokens] = self._of(key, enough=2 * SLOWER * shortest)
            if seconds > SLOWER * shortest:
                break
            most, taken = key, seconds
        start = min(most.pages * self._steps.page, FAR) - most.tokens
        if start < most.tokens or not self._steps.pools:
            return most.tokens, math.inf
        near = (taken - shortest) * most.tokens / max(most.tokens - base.tokens, 1)
        more = self._of(most, start) - taken
        return most.tokens, start * near / more if near > 0 and more > 0 else math.inf

    def by_tokens(self) -> dict[int, float]:
        """Return how long steps take, by tokens, as far as `longest_joined` measured it, and shorter ones."""
        shorter = {key.tokens: key for key in self._steps.keys if key.samples == key.tokens < min(self._times)}
        self._times |= {size: self._of(key) for size, key in shorter.items()}
        return dict(sorted(self._times.items()))

    def most_rounds(self) -> int:
        """Measure a step of one row. Return the most rounds of one that nobody waits for longer than ROUND_SECONDS."""
        return max(1, min(ROUNDS, int(ROUND_SECONDS / self.one_round()))) if self._steps.overlaps else 1

    def one_round(self) -> float:
        """Measure a step of one row, in seconds."""
        return self._of(self._steps.keys[0])

    def _of(self, key: TokensKey, start: int | None = None, enough: float = math.inf) -> float:
        """Measure a step of no sequence, or of a prompt from position `start` on, in seconds. See `shortest`."""
        tokens, segments = np.zeros(key.tokens, TOKEN), self._steps.segments(key)
        tokens["end"], tokens["chosen"], tokens["adapter"] = 1, -1, -1
        if start is not None:
            tokens["position"], tokens["end"] = start + np.arange(key.tokens), start + key.tokens
            segments["count"][0], segments["start"][0], segments["of_prompt"][0] = key.tokens, start, 1
            tables = segments["pages"][0].reshape(len(self._steps.pools), -1)
            tables[:] = np.arange(tables.shape[1]) % min(
                kind.slots for kind in self._steps.layout.kinds.values() if kind.heads
            )
        rows = sampled_rows([], [], key.samples)
        packed = PackedTokens(key, tokens, segments, rows, [])
        self._steps.store.load(key)
        return shortest(lambda: self._steps.choose(self._steps.start(packed), None).read(), enough)


def shortest(call: Callable[[], object], enough: float = math.inf) -> float:
    """Measure a call, in seconds: the shortest of three times, or of two if these take LONG together.

    After one of `enough` seconds, another would tell nothing new.
    """
    times: list[float] = []
    while len(times) < 3:
        began = perf_counter()
        call()
        times.append(perf_counter() - began)
        if times[-1] >= enough or (len(times) == 2 and sum(times) >= LONG):
            break
    return min(times)
