"""What a server tells Prometheus: the metrics of its engine, and its responses by status."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from transformers_neuronx.engine.metrics import PREFIX, text_of
from transformers_neuronx.serving.records import EngineMetrics


@dataclass(frozen=True, eq=False)
class ServerMetrics:
    """The metrics of an engine, and how many responses had each status."""

    engine: EngineMetrics
    statuses: Mapping[int, int]

    def prometheus(self) -> str:
        """Return the metrics in Prometheus' text format."""
        return text_of(self)

    def collect(self) -> Iterator[Any]:
        """Yield the metrics for a registry of Prometheus' client."""
        from prometheus_client.core import CounterMetricFamily

        yield from self.engine.collect()
        text = "Responses, by their status; 499 is for clients that went away before."
        responses = CounterMetricFamily(f"{PREFIX}_http_responses", text, labels=["model", "status"])
        for status, count in sorted(self.statuses.items()):
            responses.add_metric([self.engine.model, str(status)], count)
        yield responses
