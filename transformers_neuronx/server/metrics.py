"""What a server tells Prometheus: the metrics of its engines, and its responses by status."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers_neuronx.engine.metrics import Collector, counted_by
from transformers_neuronx.serving.records import EngineMetrics


@dataclass(frozen=True, eq=False)
class ServerMetrics(Collector):
    """The metrics of engines, which differ by the model's name, and how many responses had each status."""

    engines: Sequence[EngineMetrics]
    statuses: Mapping[int, int]

    def collect(self) -> Iterator[Any]:
        for same in zip(*(engine.collect() for engine in self.engines), strict=True):
            for other in same[1:]:
                same[0].samples += other.samples
            yield same[0]
        counts = {str(status): count for status, count in sorted(self.statuses.items())}
        text = "Responses, by their status; 499 is for clients that went away before."
        yield counted_by({}, "http_responses", text, "status", counts)
