"""Ports that are free."""

import socket
from contextlib import closing


def free_port():
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        return taken.getsockname()[1]
