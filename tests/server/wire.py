"""A connection to a server, over which anything can be sent, at any speed, and which can be broken off anywhere."""

import asyncio
import json
import socket
import struct
from collections import Counter
from typing import NamedTuple


class Response(NamedTuple):
    status: int
    headers: dict
    body: bytes

    def json(self):
        return json.loads(self.body)


class ClosedError(ConnectionError):
    """The server has closed the connection before a response."""


def request(method, path, body=None, **headers):
    """Return a request as bytes; a body without a length in the headers gets its own."""
    if body is not None:
        headers = {"Content-Type": "application/json", "Content-Length": len(body)} | headers
    lines = [f"{method} {path} HTTP/1.1", "Host: soak", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + (body or b"")


class Wire:
    """One connection at a time, which is kept for the next request, as clients do. `statuses` counts responses."""

    def __init__(self, host, port, statuses=None):
        self.address, self.reader, self.writer = (host, port), None, None
        self.statuses = Counter() if statuses is None else statuses

    async def send(self, data, buffer=None):
        """Send bytes; over a new connection if there is none, or if it gets a `buffer` of so many bytes."""
        if self.writer is None or buffer:
            self.close()
            connection = socket.socket()
            if buffer:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
            connection.setblocking(False)
            try:
                await asyncio.get_running_loop().sock_connect(connection, self.address)
            except OSError:
                connection.close()
                raise
            self.reader, self.writer = await asyncio.open_connection(sock=connection, limit=buffer or 2**16)
        self.writer.write(data)
        await self.writer.drain()

    async def ask(self, method, path, body=None, **headers):
        """Send a request, and return its response. A kept connection may have been closed meanwhile."""
        data, kept = request(method, path, body, **headers), self.writer is not None
        try:
            await self.send(data)
            return await self.response()
        except (ConnectionResetError, BrokenPipeError, ClosedError):
            self.close()
            if not kept:
                raise
            await self.send(data)
            return await self.response()

    async def head(self):
        """Return the status and the headers of a response."""
        try:
            text = await self.reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError as error:
            raise (ConnectionError("in the middle of headers") if error.partial else ClosedError()) from error
        first, *lines = text.decode("latin-1").split("\r\n")[:-2]
        status = int(first.split(" ")[1])
        self.statuses[status] += 1
        return status, {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}

    async def response(self):
        status, headers = await self.head()
        body = b"".join([part async for part in self.parts(headers)])
        return Response(status, headers, body)

    async def parts(self, headers, pause=None):
        """Yield the parts of a body. With `pause`, wait for what it returns before each."""
        try:
            if "content-length" in headers:
                yield await self.reader.readexactly(int(headers["content-length"]))
            while headers.get("transfer-encoding") == "chunked":
                if pause:
                    await pause()
                size = int(await self.reader.readuntil(b"\r\n"), 16)
                part = await self.reader.readexactly(size + 2)
                if not size:
                    break
                yield part[:-2]
        except asyncio.IncompleteReadError as error:
            raise ConnectionError("in the middle of a body") from error
        if headers.get("connection", "").lower() == "close":
            self.close()

    def close(self, reset=False):
        """Close the connection, if there is one; with `reset`, at once and without a word."""
        if self.writer is None:
            return
        if reset:
            how = struct.pack("ii", 1, 0)
            self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, how)
        self.writer.close()
        self.reader = self.writer = None
