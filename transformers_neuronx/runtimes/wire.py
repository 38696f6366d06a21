"""Messages between a process and its workers: JSON with arrays behind it, over a connection.

Each side says every second that it is there. A side that hears nothing for a while takes the other for lost.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from transformers_neuronx.runtimes.meeting import BEAT, SILENCE

_LENGTH = struct.Struct("!I")
_AT_ONCE = 2**20  # bytes; each part has SILENCE seconds to go out

Bytes = bytes | bytearray | memoryview


class Message(NamedTuple):
    """What it says, and the bytes of arrays."""

    says: dict[str, Any]
    data: list[bytearray]


class Wire:
    """One connection. Any thread sends; one receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._turn = connection, threading.Lock()
        self._closed = threading.Event()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.wait(SILENCE)
        threading.Thread(target=self._beat, name="signs of life", daemon=True).start()

    def send(self, says: Mapping[str, Any], data: Sequence[Bytes] = ()) -> None:
        """Send a message. Raises OSError if the other side is gone, or takes nothing for too long."""
        text = json.dumps({**says, "sizes": [len(each) for each in data]} if data else says).encode()
        small = b"".join([_LENGTH.pack(len(text)), text, *(each for each in data if len(each) < _AT_ONCE)])
        with self._turn:
            self._connection.sendall(small)
            for each in data:
                if len(each) >= _AT_ONCE:
                    for start in range(0, len(each), _AT_ONCE):
                        self._connection.sendall(each[start : start + _AT_ONCE])

    def receive(self) -> Message:
        """Wait for a message. Raises OSError if the other side is gone, or has been silent for too long."""
        while True:
            says = json.loads(self._exactly(_LENGTH.unpack(self._exactly(_LENGTH.size))[0]))
            if says:
                break
        sizes = says.pop("sizes", ())
        data = [bytearray() for _ in sizes]
        for large in (False, True):
            for number, size in enumerate(sizes):
                if (size >= _AT_ONCE) == large:
                    data[number] = self._exactly(size)
        return Message(says, data)

    def wait(self, seconds: float) -> None:
        """Wait so long for a sign of life from now on."""
        self._connection.settimeout(seconds)

    def close(self) -> None:
        self._closed.set()
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _exactly(self, size: int) -> bytearray:
        found = bytearray(size)
        rest = memoryview(found)
        while rest:
            if not (count := self._connection.recv_into(rest)):
                raise ConnectionError("the connection was closed")
            rest = rest[count:]
        return found

    def _beat(self) -> None:
        while not self._closed.wait(BEAT):
            try:
                self.send({})
            except OSError:
                return  # who receives notices
