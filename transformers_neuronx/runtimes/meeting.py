"""Processes of a world meet before they compute, and each notices when another is gone.

Every rank has a connection to rank 0. What all must have alike is compared when they meet: a difference ends them with
a sentence, before an engine waits for somebody who never comes. Later they say every second that they are there, and
how far they are.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from time import monotonic
from typing import Any, NoReturn
from zlib import crc32

from transformers_neuronx.errors import EngineError
from transformers_neuronx.runtimes.world import World

BEAT = 1.0  # seconds between two signs of life
SILENCE = 10.0  # seconds without one, after which a rank is lost
PATIENCE = 60.0  # seconds that ranks wait for each other at the start
KEPT = 10_000  # numbers of commands that rank 0 can compare
HELLO = 2.0  # seconds in which who connects must say who it is


class Peer:
    """A connection to another rank: lines of JSON."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.heard, self._rest = connection, monotonic(), b""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: Mapping[str, Any]) -> None:
        with suppress(OSError):  # who reads it notices that it is closed
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def messages(self) -> list[dict[str, Any]] | None:
        """Return what has come, which may be nothing, after at least a byte is there; None if the peer is gone."""
        try:
            data = self.connection.recv(2**16)
        except OSError:
            data = b""
        if not data:
            return None
        self.heard = monotonic()
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def message(self, seconds: float) -> dict[str, Any]:
        """Wait for one message. Raises OSError or ValueError if none comes in this time."""
        self.connection.settimeout(seconds)
        found: list[dict[str, Any]] = []
        while not found:
            more = self.messages()
            if more is None:
                raise ConnectionError
            found = more
        self.connection.settimeout(None)
        return found[0]


class Meeting:
    """What the ranks of a world know of each other. `told` is what rank 0 has told all: JSON.

    `facts` must be the same for all ranks. Raises EngineError, with the same sentence in all ranks that came, if
    somebody does not come in time or has other facts.
    """

    def __init__(self, world: World, facts: Mapping[str, Any], tell: Callable[[str], Mapping[str, Any]]) -> None:
        self.world, self._facts = world, dict(facts)
        self._done = deque([(0, 0)], maxlen=KEPT)  # numbers of commands, and a digest of each with all before
        self._ahead: list[tuple[int, int, int]] = []  # rank, number and digest of ranks that are further than this one
        self._ended: set[int] = set()  # ranks that are at their end, as they should
        self._over = threading.Event()
        self.peers: dict[int, Peer] = {}
        try:
            self.told, self.address = self._gathered(tell) if world.rank == 0 else self._joined()
        except BaseException:
            self._close()
            raise
        self._thread = threading.Thread(target=self._watch, name="world", daemon=True)
        self._thread.start()

    def _gathered(self, tell: Callable[[str], Mapping[str, Any]]) -> tuple[dict[str, Any], str]:
        """Wait for all others. Return what they are told, and the address at which they reach this process."""
        world, until, address = self.world, monotonic() + PATIENCE, self.world.host
        try:
            listener = socket.create_server(("", world.port))
        except OSError as error:
            why = f"rank 0 cannot listen at port {world.port}, where ranks meet: {os.strerror(error.errno or 0)}"
            raise EngineError(why) from None
        with listener:
            while len(self.peers) < world.size - 1:
                listener.settimeout(max(until - monotonic(), 0.001))
                try:
                    peer = Peer(listener.accept()[0])
                except TimeoutError:
                    missing = ", ".join(str(rank) for rank in range(1, world.size) if rank not in self.peers)
                    self._refuse(f"rank {missing} did not come to {world.host}:{world.port} in {PATIENCE:.0f} seconds")
                try:
                    hello = peer.message(HELLO)
                    rank, facts = int(hello["rank"]), dict(hello["facts"])
                except (OSError, ValueError, LookupError, TypeError):
                    peer.connection.close()  # not one of ours
                    continue
                if rank in self.peers or not 0 < rank < world.size:
                    peer.send(dict(error=(wrong := f"there are two processes with rank {rank}, or it is too large")))
                    peer.connection.close()
                    self._refuse(wrong)
                self.peers[rank] = peer
                address = peer.connection.getsockname()[0]
                if differ := [name for name in facts | self._facts if facts.get(name) != self._facts.get(name)]:
                    sides = ", ".join(f"{name} {facts.get(name)!r}, not {self._facts.get(name)!r}" for name in differ)
                    self._refuse(f"rank {rank} has another {sides}, as rank 0 has")
        told = dict(tell(address))
        for peer in self.peers.values():
            peer.send(told)
        return told, address

    def _joined(self) -> tuple[dict[str, Any], str]:
        """Go to rank 0. Return what it tells, and the address of this process."""
        world, until = self.world, monotonic() + PATIENCE
        while True:
            try:
                connection = socket.create_connection((world.host, world.port), timeout=HELLO)
                if connection.getsockname() != connection.getpeername():
                    break
                connection.close()  # on one host, before rank 0 listens, a socket can have been given this very port
            except OSError as error:
                if monotonic() > until:
                    where = f"{world.host}:{world.port}"
                    raise EngineError(f"rank 0 did not come to {where} in {PATIENCE:.0f} seconds: {error}") from None
                self._over.wait(0.1)
        self.peers[0] = peer = Peer(connection)
        peer.send(dict(rank=world.rank, facts=self._facts))
        try:
            told = peer.message(2 * PATIENCE)
        except (OSError, ValueError):
            raise EngineError(f"rank 0 at {world.host}:{world.port} did not answer") from None
        if "error" in told:
            raise EngineError(told["error"])
        return told, connection.getsockname()[0]

    def _refuse(self, sentence: str) -> NoReturn:
        for peer in self.peers.values():
            peer.send(dict(error=sentence))
        raise EngineError(sentence)

    def note(self, command: bytes | memoryview) -> None:
        """Take note of a command that all ranks must give in the same order."""
        number, digest = self._done[-1]
        self._done.append((number + 1, crc32(command, digest)))

    def leave(self) -> None:
        """Wait until all ranks are at their end. If this one ends with an error, tell the others."""
        error = getattr(sys, "last_value", None)
        if error is not None:
            self._tell(lost=f"rank {self.world.rank} ended with {type(error).__name__}: {error}")
        elif self.world.rank == 0:
            self._wait()
            self._tell(end=True)
        else:
            self._tell(end=True)
            self._wait()
        self._over.set()
        self._thread.join()
        self._close()

    def _wait(self) -> None:
        while len(self._ended) < len(self.peers) and not self._over.wait(BEAT / 20):
            pass

    def _tell(self, **message: Any) -> None:
        for peer in self.peers.values():
            peer.send(message)

    def _close(self) -> None:
        for peer in self.peers.values():
            peer.connection.close()

    def _watch(self) -> None:
        """Be the thread that gives and takes signs of life."""
        ranks = {peer.connection: rank for rank, peer in self.peers.items()}
        beat = monotonic()
        while not self._over.is_set():
            if monotonic() >= beat:
                beat = monotonic() + BEAT
                number, digest = self._done[-1]
                self._tell(number=number, digest=digest)
            ready, _, _ = select.select([c for c, rank in ranks.items() if rank not in self._ended], [], [], BEAT / 4)
            for connection in ready:
                self._hear(ranks[connection])
            for rank, peer in self.peers.items():
                if rank not in self._ended and monotonic() - peer.heard > SILENCE:
                    self._lose(f"rank {rank} has not answered for {SILENCE:.0f} seconds")
            self._compare()

    def _hear(self, rank: int) -> None:
        messages = self.peers[rank].messages()
        if messages is None:
            if not self._over.is_set():
                self._lose(f"rank {rank} is gone")
            return
        for message in messages:
            if "lost" in message:
                self._lose(message["lost"])
            elif "end" in message:
                self._ended.add(rank)
            else:
                self._ahead.append((rank, message["number"], message["digest"]))

    def _compare(self) -> None:
        """Compare what other ranks have done with what this one has."""
        if not self._ahead:
            return
        known, newest = dict(self._done.copy()), self._done[-1][0]
        for rank, number, digest in self._ahead:
            if known.get(number, digest) != digest:
                self._lose(
                    f"rank {rank} and rank {self.world.rank} run different programs, or the same with other operands, "
                    f"at command {number} or before: all ranks must do the same"
                )
        self._ahead = [each for each in self._ahead if each[1] > newest]

    def _lose(self, sentence: str) -> None:
        """End this process: it may wait for the lost one inside of an engine, where nothing else would end it."""
        self._over.set()
        self._tell(lost=sentence)
        if hasattr(sys, "last_value"):
            return  # it ends already, and has said why
        sys.stderr.write(f"error: {sentence}; rank {self.world.rank} cannot go on without it\n")
        sys.stderr.flush()
        os._exit(1)
