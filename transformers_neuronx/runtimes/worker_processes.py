"""Starts worker processes on this host, and waits for those of all hosts.

A worker is `python -m transformers_neuronx.models.worker`. It reads its orders, one line of JSON, from its standard
input, connects to the process that leads, joins the other workers, and then does what it is told. It ends when that
connection ends, or its standard input, which the process has that started it.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from time import monotonic, sleep
from typing import IO, Any

from transformers_neuronx import env
from transformers_neuronx.config.workers import Workers
from transformers_neuronx.errors import EngineError
from transformers_neuronx.runtimes.meeting import HELLO, PATIENCE, SILENCE
from transformers_neuronx.runtimes.wire import Wire

_LOG = logging.getLogger(__name__)

MODULE = "transformers_neuronx.models.worker"
LAST_WORDS = 1.0  # seconds in which a worker that has closed its connection ends
MOMENT = 0.5  # seconds in which it does, once others have noticed that it is gone
RETRY = 0.2  # seconds between two tries to reach the first node


class Process:
    """A worker on this host. It is in a session of its own, so that Ctrl-C in a terminal does not reach it."""

    def __init__(self, orders: Mapping[str, Any]) -> None:
        self.rank: int = orders["rank"]
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        world = f"{self.rank}/{orders['size']}@{orders['address']}:{orders['meeting']}"
        self._process = subprocess.Popen(
            [sys.executable, "-m", MODULE], env=env.for_child() | {env.WORLD.name: world}, stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL, stderr=self._errors, start_new_session=True,
        )  # fmt: skip
        assert self._process.stdin
        self._pipe = self._process.stdin
        with suppress(OSError):
            self._pipe.write(json.dumps(dict(orders)).encode() + b"\n")
            self._pipe.flush()

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def why(self) -> str:
        """Return what it has said, or else how it has ended."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(LAST_WORDS)
        said = os.pread(self._errors.fileno(), 2**20, 0).decode(errors="replace")
        lines = [line for line in said.splitlines() if line.strip()]
        if errors := [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]:
            return errors[-1]
        status = self._process.poll()
        if status and status > 0 and lines:
            return f"worker {self.rank} is gone: {lines[-1]}"
        return f"worker {self.rank} is gone" + (f" (signal {-status})" if status else "")

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._errors.close()
        with suppress(OSError):
            self._pipe.close()


class Leader:
    """Starts the workers of all nodes, as often as needed, and has the port at which they find this process."""

    def __init__(self, workers: Workers, platform: str, degree: int) -> None:
        self._workers = workers
        self._orders = dict(platform=platform, degree=degree, size=workers.size, address=workers.address)
        try:
            self._listener = socket.create_server(("" if workers.nodes > 1 else workers.address, workers.port))
        except OSError as error:
            why = os.strerror(error.errno or 0)
            raise EngineError(f"cannot listen at port {workers.port}, where workers connect: {why}") from None
        self._listener.settimeout(RETRY)
        self._processes: list[Process] = []
        self._nodes: dict[int, Wire] = {}  # other nodes
        self._ranks: dict[int, Wire] = {}

    def start(self) -> list[Wire]:
        """Start all workers, and return the connection of each rank. Raises EngineError if some do not come."""
        port = self._listener.getsockname()[1]
        orders = self._orders | dict(port=port, meeting=_free_port(), token=secrets.token_hex(16))
        try:
            self._processes = [Process(orders | dict(rank=rank)) for rank in self._workers.ranks(0)]
            until = monotonic() + PATIENCE
            while len(self._ranks) < self._workers.size:
                self._take(orders)
                self._check(until)
        except BaseException:
            self.end()
            raise
        return [self._ranks[rank] for rank in range(self._workers.size)]

    def _take(self, orders: Mapping[str, Any]) -> None:
        """Let a node or a worker come, if there is one."""
        try:
            wire = Wire(self._listener.accept()[0])
        except TimeoutError:
            return
        try:
            wire.wait(HELLO)
            says = wire.receive().says
            wire.wait(SILENCE)
            if "node" in says and 0 < (node := int(says["node"])) < self._workers.nodes:
                wire.send(dict(orders=orders, ranks=[*self._workers.ranks(node)]))
                self._nodes[node] = wire
            elif "node" in says:
                wire.send(dict(error=f"--node-rank must be from 1 to {self._workers.nodes - 1}, got {says['node']}"))
            elif says["token"] == orders["token"]:
                self._ranks[int(says["rank"])] = wire
            else:
                wire.close()
        except (OSError, ValueError, LookupError, TypeError):
            wire.close()  # not one of ours

    def _check(self, until: float) -> None:
        for process in self._processes:
            if not process.running:
                raise EngineError(process.why())
        if monotonic() > until:
            nodes = [str(node) for node in range(1, self._workers.nodes) if node not in self._nodes]
            ranks = [str(rank) for rank in range(self._workers.size) if rank not in self._ranks]
            missing = f"node {', '.join(nodes)}" if nodes else f"worker {', '.join(ranks)}"
            raise EngineError(f"{missing} did not come in {PATIENCE:.0f} seconds")

    def why(self, rank: int) -> str:
        """Return why the connection to a worker has ended."""
        of_this_host = [process for process in self._processes if process.rank == rank]
        return of_this_host[0].why() if of_this_host else f"worker {rank} is gone"

    def ended(self, but: int | None = None) -> str:
        """Return why a worker of this host has ended, or "" if all but this one run.

        What one computes with others fails when one of them ends, and it may say so before that is known here.
        """
        until = monotonic() + MOMENT
        while monotonic() < until:
            if gone := [each for each in self._processes if each.rank != but and not each.running]:
                return gone[0].why()
            sleep(0.02)
        return ""

    def end(self) -> None:
        """End all workers. Other nodes come again for the next ones."""
        for wire in (*self._nodes.values(), *self._ranks.values()):
            wire.close()
        for process in self._processes:
            process.end()
        self._processes, self._nodes, self._ranks = [], {}, {}

    def dismiss(self) -> None:
        """Let other nodes go, and take none any more. Workers are still there."""
        for wire in self._nodes.values():
            with suppress(OSError):
                wire.send(dict(end=True))
        self._listener.close()


def follow(address: str, port: int, node: int) -> None:
    """Be another node: run workers for the first one, at this address, until it ends.

    Raises EngineError if it does not come, or is gone for too long.
    """
    while True:
        wire = _found(address, port)
        processes: list[Process] = []
        try:
            wire.send(dict(node=node))
            says = wire.receive().says
            if "error" in says:
                raise EngineError(says["error"])
            processes = [Process(says["orders"] | dict(rank=rank)) for rank in says["ranks"]]
            if "end" in wire.receive().says:
                return
        except OSError:
            _LOG.warning("the workers here have ended, and begin anew")
        finally:
            wire.close()
            for process in processes:
                process.end()


def _found(address: str, port: int) -> Wire:
    until = monotonic() + PATIENCE
    while True:
        try:
            return Wire(socket.create_connection((address, port), timeout=HELLO))
        except OSError as error:
            if monotonic() > until:
                came = f"did not come to {address}:{port} in {PATIENCE:.0f} seconds"
                raise EngineError(f"the first node {came}: {error}") from None
        sleep(RETRY)


def _free_port() -> int:
    with socket.create_server(("", 0)) as free:
        port: int = free.getsockname()[1]
    return port
