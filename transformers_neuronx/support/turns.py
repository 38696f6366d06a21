"""Calls of one model take turns: it has one set of caches, and only the call that has the turn may use them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from transformers_neuronx.errors import InputError

_NUMBERS = itertools.count()


class Turns:
    """The turns of one model, which errors call `name`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.number = next(_NUMBERS)
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._call = ""

    @contextmanager
    def take(self, call: str, within: str = "") -> Iterator[None]:
        """Wait until no other thread has the turn, and take it. Inside the call `within`, use that call's turn.

        Raises InputError if this thread has the turn for another call: it would wait for itself, or change the
        sequences of that call.
        """
        if self.within(within):
            yield
            return
        if self._thread == threading.get_ident():
            raise InputError(
                f"{call} of {self.name} was called inside {self._call} of the same model, by a streamer, a criterion or"
                " another callback; call it after that returns, or use a second model"
            )
        with self._lock:
            self._thread, self._call = threading.get_ident(), call
            try:
                yield
            finally:
                self._thread = None

    def within(self, call: str) -> bool:
        """Whether this thread has the turn for `call`."""
        return self._thread == threading.get_ident() and self._call == call


@contextmanager
def take_all(turns: Iterable[Turns], call: str, within: str = "") -> Iterator[None]:
    """Take the turns of several models, always in the same order, so that no two callers wait for each other."""
    with ExitStack() as stack:
        for each in sorted(set(turns), key=lambda each: each.number):
            stack.enter_context(each.take(call, within))
        yield
