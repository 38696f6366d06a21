"""Ctrl-C where it must wait."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_back() -> Iterator[None]:
    """Hold Ctrl-C back until the block ends. An extension whose initialization it interrupts aborts the process.

    Only the main thread is interrupted, so a block of another thread runs as it is.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is None:
        yield
        return
    came = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: came.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came.is_set():
            signal.raise_signal(signal.SIGINT)
