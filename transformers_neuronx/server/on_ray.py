"""Replicas of a server on Ray Serve, which sends a request to the shorter queue of two. It needs the extra `ray`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

import ray
from ray import serve

from transformers_neuronx.errors import EngineError
from transformers_neuronx.server.app import Server

NAME = "transformers-neuronx"


class Replicas(NamedTuple):
    """From `least` to `most` replicas of `processes` with devices each, for `rows` requests at once.

    After `drain` seconds, requests of a replica that ends are ended, too.
    """

    least: int
    most: int
    processes: int
    rows: int
    drain: int


class Replica:
    """A server in a process that Ray has started. Its worker processes, if there are some, are on the same host."""

    def __init__(self, opened: Callable[[], AbstractContextManager[Server]]) -> None:
        self._opened = ExitStack()
        self._server = self._opened.enter_context(opened())

    def __serve_build_asgi_app__(self) -> Any:
        return self._server.app

    def check_health(self) -> None:
        """Ray calls this, and replaces a replica for which it raises."""
        if not self._server.healthy:
            raise EngineError("the engine makes no progress")

    def __del__(self) -> None:
        self._opened.close()


def deployment(opened: Callable[[], AbstractContextManager[Server]], replicas: Replicas) -> Any:
    """Return Ray's application of a server, which each replica opens for itself."""
    scale: dict[str, Any] = dict(num_replicas=replicas.least)
    if replicas.most > replicas.least:
        load = dict(target_ongoing_requests=replicas.rows)
        scale = dict(autoscaling_config=dict(min_replicas=replicas.least, max_replicas=replicas.most, **load))
    if replicas.processes > 1:  # all on one host
        scale |= dict(placement_group_bundles=[{"CPU": 1}] * replicas.processes, placement_group_strategy="STRICT_PACK")
    configured = serve.deployment(
        name=NAME,
        max_ongoing_requests=4 * replicas.rows,  # those beyond `rows` wait in the engine
        health_check_period_s=2,
        health_check_timeout_s=10,
        graceful_shutdown_timeout_s=replicas.drain,
        **scale,
    )
    return configured(serve.ingress()(Replica)).bind(opened)


@contextmanager
def running(
    opened: Callable[[], AbstractContextManager[Server]], replicas: Replicas, host: str, port: int
) -> Iterator[str]:
    """Run replicas on Ray's cluster, or on this machine if there is none. Yields the address of the proxy."""
    ray.init(log_to_driver=False, namespace=NAME)
    try:
        serve.start(http_options=dict(host=host, port=port))
        serve.run(deployment(opened, replicas), name=NAME, route_prefix="/")
        yield f"http://{host}:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()
