"""What requests of an engine waited for, and how many tokens they had: for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from transformers_neuronx.engine.metrics import Collector, Histogram, counted_by, families
from transformers_neuronx.serving.kv_cache import KVCache
from transformers_neuronx.serving.request import Request
from transformers_neuronx.serving.scheduler import Scheduler

LENGTHS = [2**power for power in range(18)]  # histogram bounds of tokens: 1 to 131,072


@dataclass
class Times:
    """When a request was submitted, a step with it was started, and its first and last tokens came: seconds of
    `time.monotonic()`. `tokens` is how many came.
    """

    submitted: float
    started: float | None = None
    first: float | None = None
    last: float = 0.0
    tokens: int = 0


def _lengths() -> Histogram:
    return Histogram(LENGTHS)


@dataclass
class Records:
    """Totals of an engine's requests. Its thread, or who has the turn, adds to them."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    ended: Counter[str] = field(default_factory=Counter)  # requests by the reason of their end
    steps: Histogram = field(default_factory=Histogram)
    queue: Histogram = field(default_factory=Histogram)
    prefill: Histogram = field(default_factory=Histogram)
    first: Histogram = field(default_factory=Histogram)
    between: Histogram = field(default_factory=Histogram)
    decode: Histogram = field(default_factory=Histogram)
    whole: Histogram = field(default_factory=Histogram)
    each: Histogram = field(default_factory=Histogram)
    prompts: Histogram = field(default_factory=_lengths)
    answers: Histogram = field(default_factory=_lengths)

    def start(self, times: Times, now: float) -> None:
        """Note that a step with a request was started."""
        if times.started is None:
            times.started = now
            self.queue.add(now - times.submitted)

    def tell(self, times: Times, request: Request, now: float) -> None:
        """Note the tokens of a request that came. Those that come together share the time equally."""
        new = request.generated - times.tokens
        if new <= 0:
            return
        times.tokens += new
        self.generated_tokens += new
        if times.first is None:
            times.first = now
            self.first.add(now - times.submitted)
            self.prefill.add(now - (times.started or now))
            self.prompt_tokens += request.prompt_length
            self.cached_tokens += request.cached
        else:
            self.between.add((now - times.last) / new, new)
        times.last = now

    def end(self, times: Times, request: Request, now: float) -> None:
        """Note that a request ended."""
        self.ended[request.reason or ""] += 1
        self.draft_tokens += request.drafted
        self.accepted_tokens += request.accepted
        self.whole.add(now - times.submitted)
        if request.pooling and request.reason == "stop":
            self.prompt_tokens += request.prompt_length
            self.cached_tokens += request.cached
        if times.first is not None:
            self.prompts.add(request.prompt_length)
            self.answers.add(times.tokens)
            self.decode.add(times.last - times.first)
            if times.tokens > 1:
                self.each.add((times.last - times.first) / (times.tokens - 1))


@dataclass(frozen=True, eq=False)
class EngineMetrics(Collector):
    """What an engine does now, and totals of all requests so far. `model` is a label in Prometheus' text."""

    model: str
    records: Records
    scheduler: Scheduler

    @property
    def running(self) -> int:
        """Requests that run."""
        return len(self.scheduler.running)

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self.scheduler.waiting)

    def collect(self) -> Iterator[Any]:
        yield from families(self.model, self._counters(), self._histograms(), self._gauges())
        ended = {reason: self.records.ended[reason] for reason in ("stop", "length", "abort", "error")}
        text = "Requests that ended, by the reason."
        yield counted_by(dict(model=self.model), "finished_requests", text, "reason", ended)

    def _counters(self) -> dict[str, tuple[str, float]]:
        records = self.records
        return dict(
            prompt_tokens=("Tokens of prompts.", records.prompt_tokens),
            cached_prompt_tokens=("Tokens of prompts that were in the cache.", records.cached_tokens),
            generated_tokens=("Generated tokens.", records.generated_tokens),
            draft_tokens=("Draft tokens that were verified.", records.draft_tokens),
            accepted_draft_tokens=("Generated tokens that were draft tokens.", records.accepted_tokens),
            preemptions=("Times that a request lost its pages, and started again.", self.scheduler.preemptions),
        )

    def _histograms(self) -> dict[str, tuple[str, Histogram]]:
        records = self.records
        return dict(
            time_to_first_token_seconds=("Time from a request to its first token.", records.first),
            inter_token_seconds=("Time between two tokens of a request.", records.between),
            time_per_output_token_seconds=("Mean time between the tokens of a request.", records.each),
            queue_seconds=("Time that a request waited for its first step.", records.queue),
            prefill_seconds=("Time from a request's first step to its first token.", records.prefill),
            decode_seconds=("Time from a request's first token to its last.", records.decode),
            request_seconds=("Time from a request to its end.", records.whole),
            step_seconds=("Time from the end of a step to the end of the next.", records.steps),
            request_prompt_tokens=("Tokens of a prompt.", records.prompts),
            request_generated_tokens=("Tokens of an answer.", records.answers),
        )

    def _gauges(self) -> dict[str, tuple[str, float]]:
        limits, used, positions = self.scheduler.limits, *_positions(self.scheduler.cache)
        return dict(
            requests_running=("Requests that run.", self.running),
            requests_waiting=("Requests that wait.", self.waiting),
            rows=("Most requests that run at once.", limits.rows),
            cache_positions=("Positions that the cache has room for.", positions),
            cache_positions_used=("Positions of the cache that requests have.", used),
        )


def _positions(cache: KVCache) -> tuple[int, int]:
    """Return how many positions of a cache are used, and how many there are: of the layers that keep the most."""
    if not cache.pools:
        return 0, 0
    pool = max(cache.pools, key=lambda pool: pool.positions)
    return pool.positions - pool.free * pool.size, pool.positions
