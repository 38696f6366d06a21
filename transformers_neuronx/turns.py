"""Callers of one model take turns: it has one set of caches, and whoever has the turn has them alone."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from transformers_neuronx.errors import InputError

_NUMBERS = itertools.count()


class Turns:
    """Those of one model, which errors call `name`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.number = next(_NUMBERS)
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._call = ""

    @contextmanager
    def take(self, call: str, within: str = "") -> Iterator[None]:
        """Wait until no other thread has the turn, and have it. As a part of the call `within`, go on with its turn.

        InputError where this thread has it for another call: that would wait for itself, and would otherwise spoil
        the sequences of that call.
        """
        if self.within(within):
            yield
            return
        if self._thread == threading.get_ident():
            raise InputError(
                f"{call} of {self.name} was called inside {self._call} of the same model, by a streamer, a criterion or"
                " another callback; call it when that has returned, or use a second model"
            )
        with self._lock:
            self._thread, self._call = threading.get_ident(), call
            try:
                yield
            finally:
                self._thread = None

    def within(self, call: str) -> bool:
        """Whether this thread has the turn, for that call."""
        return self._thread == threading.get_ident() and self._call == call


@contextmanager
def take_all(turns: Iterable[Turns], call: str, within: str = "") -> Iterator[None]:
    """Have the turn of several models, taken in the same order by everyone, so that no two wait for each other."""
    with ExitStack() as stack:
        for each in sorted(set(turns), key=lambda each: each.number):
            stack.enter_context(each.take(call, within))
        yield
