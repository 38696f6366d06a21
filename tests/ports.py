"""Ports that are free."""

import random
import socket
from contextlib import closing

# Systems give higher ports to whoever connects, so those may be taken again before a test listens there.
CHOICE = range(20_000, 32_000)
DRAW = random.SystemRandom()  # tests that run side by side have the same seeds


def free_port():
    while True:
        port = DRAW.choice(CHOICE)
        try:
            with closing(socket.create_server(("127.0.0.1", port))):
                return port
        except OSError:
            continue
