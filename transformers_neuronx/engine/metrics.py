"""Timings of calls and memory of a model: as a table, as JSON, and for Prometheus."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from transformers_neuronx.engine.decoder import MemoryUse

BUCKETS = [0.001 * 2**power for power in range(17)]  # histogram bounds in seconds: 1 ms to 65 s
PREFIX = "transformers_neuronx"  # of names in Prometheus


@dataclass
class Call:
    """One call. A step makes a token for every row. Steps that return together share their time equally."""

    prompt_tokens: int = 0
    new_tokens: int = 0
    seconds: float = 0.0
    time_to_first_token: float | None = None  # seconds, to the first token or to the logits
    token_latencies: list[float] = field(default_factory=list)  # seconds of each step after that
    began: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self._marked = self.began

    def mark(self, steps: int = 1) -> None:
        """Record that `steps` steps have returned."""
        now = time.perf_counter()
        if self.time_to_first_token is None:
            self.time_to_first_token = now - self.began
        else:
            self.token_latencies += [(now - self._marked) / steps] * steps
        self._marked = now

    def timed(self, blocks: Iterator[np.ndarray[Any, Any]]) -> Iterator[np.ndarray[Any, Any]]:
        """Yield blocks of tokens [batch, steps], timed as they come. Time that the caller spends is not counted."""
        for block in blocks:
            self.mark(block.shape[1])
            yield block
            self._marked = time.perf_counter()


class Histogram:
    """How many values there were up to each of some bounds, and their sum."""

    def __init__(self, bounds: Sequence[float] = BUCKETS) -> None:
        self._bounds, self.counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Add a value, so many times."""
        self.counts[bisect_left(self._bounds, value)] += times
        self.total += value * times

    @property
    def mean(self) -> float:
        """The mean of the values; 0 if there are none."""
        return self.total / max(sum(self.counts), 1)

    def cumulative(self) -> list[tuple[str, int]]:
        """Return each bound with the number of values up to it, as Prometheus expects."""
        totals = np.cumsum(self.counts).tolist()
        return [(str(bound), count) for bound, count in zip([*self._bounds, "+Inf"], totals, strict=True)]


@dataclass
class Totals:
    """Totals of all calls so far."""

    calls: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    first: Histogram = field(default_factory=Histogram)
    each: Histogram = field(default_factory=Histogram)


class Meter:
    """Measures the calls of a model. A call inside another is part of it, as the steps of `generate()` are."""

    def __init__(self) -> None:
        self.last = Call()
        self.totals = Totals()
        self._open: Call | None = None

    @contextmanager
    def call(self, prompt_tokens: int = 0) -> Iterator[Call]:
        """Measure a call, if it succeeds. The first tokens that come in are its prompt."""
        if self._open is not None:
            self._open.prompt_tokens = self._open.prompt_tokens or prompt_tokens
            yield self._open
            return
        self._open = call = Call(prompt_tokens)
        try:
            yield call
        finally:
            self._open = None
        call.seconds = time.perf_counter() - call.began
        self.last = call
        self.totals.calls += 1
        self.totals.prompt_tokens += call.prompt_tokens
        self.totals.new_tokens += call.new_tokens
        if call.time_to_first_token is not None:
            self.totals.first.add(call.time_to_first_token)
        for seconds in call.token_latencies:
            self.totals.each.add(seconds)


class Collector(ABC):
    """What Prometheus' client can collect."""

    @abstractmethod
    def collect(self) -> Iterator[Any]:
        """Yield the metrics for a registry of Prometheus' client."""

    def prometheus(self) -> str:
        """Return the metrics in Prometheus' text format."""
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry()
        registry.register(self)
        text: bytes = generate_latest(registry)
        return text.decode()


@dataclass(frozen=True, eq=False)
class Metrics(Collector):
    """The last call of a model, the totals of all calls, and its memory on the devices, in seconds and bytes.

    `str()` gives a table. Compiling and loading run at the same time, so their times overlap.
    """

    model: str
    call: Call
    totals: Totals
    compile_seconds: float
    load_seconds: float
    held: MemoryUse

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all rows, per second of the call."""
        return self.call.new_tokens / self.call.seconds if self.call.seconds else 0.0

    def latency(self, percent: float) -> float | None:
        """Return a percentile of the time of steps after the first: 50 is the median."""
        latencies = self.call.token_latencies
        return float(np.percentile(latencies, percent)) if latencies else None

    def as_dict(self) -> dict[str, Any]:
        """Return the metrics of the last call as a dictionary for JSON."""
        call = self.call
        return dict(
            model=self.model,
            prompt_tokens=call.prompt_tokens,
            new_tokens=call.new_tokens,
            seconds=call.seconds,
            time_to_first_token=call.time_to_first_token,
            token_latency_p50=self.latency(50),
            token_latency_p99=self.latency(99),
            tokens_per_second=self.tokens_per_second,
            compile_seconds=self.compile_seconds,
            load_seconds=self.load_seconds,
            **{f"{name}_bytes": value for name, value in self.held._asdict().items()},
        )

    def __str__(self) -> str:
        def shown(name: str, value: Any) -> str:
            if isinstance(value, float) and name != "tokens_per_second":
                return f"{value * 1e3:,.2f} ms"
            if name.endswith("_bytes"):
                return f"{value / 2**20:,.1f} MiB"
            return "-" if value is None else f"{value:,.1f}" if isinstance(value, float) else str(value)

        facts = self.as_dict()
        width = max(map(len, facts))
        return "\n".join(f"{name.replace('_', ' '):{width}}  {shown(name, value):>16}" for name, value in facts.items())

    def collect(self) -> Iterator[Any]:
        """Yield the totals of all calls, with the model's tag as a label."""
        totals = self.totals
        counters = dict(
            calls=("Calls of the model.", totals.calls),
            prompt_tokens=("Prompt tokens.", totals.prompt_tokens),
            new_tokens=("Generated tokens.", totals.new_tokens),
        )
        histograms = dict(
            time_to_first_token_seconds=("Time from a call to its first token.", totals.first),
            token_latency_seconds=("Time of a step after the first. A step makes a token for every row.", totals.each),
        )
        gauges = dict(
            compile_seconds=("Time to compile programs, or load compiled ones.", self.compile_seconds),
            load_seconds=("Time to load weights onto the devices.", self.load_seconds),
            weights_bytes=("Weights on all devices.", self.held.weights),
            caches_bytes=("KV caches on all devices.", self.held.caches),
            temporaries_bytes=("Temporaries of the largest program on all devices.", self.held.temporaries),
        )
        yield from families(self.model, counters, histograms, gauges)


def families(
    model: str,
    counters: Mapping[str, tuple[str, float]],
    histograms: Mapping[str, tuple[str, Histogram]],
    gauges: Mapping[str, tuple[str, float]],
) -> Iterator[Any]:
    """Yield metrics for a registry of Prometheus' client. Each name has a sentence about it, and its value."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    def named(name: str, text: str) -> dict[str, Any]:
        return dict(name=f"{PREFIX}_{name}", documentation=text, labels=["model"])

    for name, (text, value) in counters.items():
        counter = CounterMetricFamily(**named(name, text))
        counter.add_metric([model], value)
        yield counter
    for name, (text, histogram) in histograms.items():
        family = HistogramMetricFamily(**named(name, text))
        family.add_metric([model], histogram.cumulative(), histogram.total)
        yield family
    for name, (text, value) in gauges.items():
        gauge = GaugeMetricFamily(**named(name, text))
        gauge.add_metric([model], value)
        yield gauge


def counted_by(labels: Mapping[str, str], name: str, text: str, label: str, counts: Mapping[str, float]) -> Any:
    """Return a counter for a registry of Prometheus' client, with a value for each value of one more label."""
    from prometheus_client.core import CounterMetricFamily

    counter = CounterMetricFamily(f"{PREFIX}_{name}", text, labels=[*labels, label])
    for value, count in counts.items():
        counter.add_metric([*labels.values(), value], count)
    return counter
