"""Servers that run in threads of the tests."""

import threading
import time
from contextlib import contextmanager

from transformers_neuronx.server.running import Running


@contextmanager
def servers():
    """`start(server)`: a `Running` that has started, with a server or what has its attributes. All end at the end."""
    all_running = []

    def start(server):
        running = Running(server, "127.0.0.1", 0)
        thread = threading.Thread(target=running.run)
        thread.start()
        all_running.append((running, thread))
        while not running.started:
            assert thread.is_alive(), "the server starts"
            time.sleep(0.01)
        return running

    yield start
    for running, _ in all_running:
        running.should_exit = True
    for _, thread in all_running:
        thread.join()
