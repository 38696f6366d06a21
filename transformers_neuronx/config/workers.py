"""Where the worker processes of a model run."""

from __future__ import annotations

from dataclasses import dataclass

from transformers_neuronx.errors import ConfigError


@dataclass(frozen=True)
class Workers:
    """Worker processes that have a model's devices, while this process has none and tells them what to do.

    There are `processes` on each of `nodes` hosts. This process is on the first host, which others reach at `address`,
    `port`; on each other host, `transformers-neuronx` runs with `--node-rank`. A port of 0 is any free one.
    """

    processes: int = 1
    nodes: int = 1
    address: str = "127.0.0.1"
    port: int = 0

    def __post_init__(self) -> None:
        if self.processes < 1 or self.nodes < 1:
            raise ConfigError(f"there must be at least one worker process on each of one node or more, got {self}")
        if self.nodes > 1 and not self.port:
            raise ConfigError(f"several nodes need an address and a port at which they find the first one, got {self}")

    @property
    def size(self) -> int:
        """Number of worker processes on all nodes."""
        return self.processes * self.nodes

    def ranks(self, node: int) -> range:
        """The numbers of a node's processes."""
        return range(node * self.processes, (node + 1) * self.processes)
