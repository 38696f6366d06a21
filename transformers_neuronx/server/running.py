"""Running a server until it is told to stop."""

from __future__ import annotations

import signal
import socket
from types import FrameType

import uvicorn

from transformers_neuronx.server.app import Server


class Running(uvicorn.Server):
    """uvicorn with a server of ours. Told to stop, it takes no more requests, and lets those that run end.

    After `drain` seconds the others are ended, too.
    """

    def __init__(self, server: Server, host: str, port: int, drain: int = 60) -> None:
        super().__init__(
            uvicorn.Config(
                server.app, host, port, http="httptools", ws="none", lifespan="off", access_log=False, log_config=None,
                server_header=False, timeout_graceful_shutdown=drain,
            )
        )  # fmt: skip
        self.server = server

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.server.draining = True
        if sig == signal.SIGTERM:
            self.should_exit = True  # uvicorn would raise the signal again, before the engine is closed
        else:
            super().handle_exit(sig, frame)

    def address(self) -> str:
        """The address that it listens at, after it was started."""
        listening: socket.socket = self.servers[0].sockets[0]
        host, port, *_ = listening.getsockname()
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
