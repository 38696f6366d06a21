"""What a server tells Prometheus: the metrics of its engine, and its responses by status."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from transformers_neuronx.engine.metrics import Collector, counted_by
from transformers_neuronx.serving.records import EngineMetrics


@dataclass(frozen=True, eq=False)
class ServerMetrics(Collector):
    """The metrics of an engine, and how many responses had each status."""

    engine: EngineMetrics
    statuses: Mapping[int, int]

    def collect(self) -> Iterator[Any]:
        yield from self.engine.collect()
        counts = {str(status): count for status, count in sorted(self.statuses.items())}
        text = "Responses, by their status; 499 is for clients that went away before."
        yield counted_by(self.engine.model, "http_responses", text, "status", counts)
