"""Handles of requests: what callers see of them, in threads and event loops."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from queue import SimpleQueue
from time import monotonic
from typing import Any, NamedTuple

import numpy as np

from transformers_neuronx.errors import EngineError
from transformers_neuronx.serving.records import Times
from transformers_neuronx.serving.request import Logprob, Request

WATCH = 1.0  # seconds between two looks at whether the devices of an idle engine are still there

Task = tuple[asyncio.AbstractEventLoop, asyncio.Event]  # one that waits for tokens


class Usage(NamedTuple):
    """Numbers of tokens: of the prompt, generated ones, those of the prompt that were in the cache already, and
    generated ones that were draft tokens.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    accepted_tokens: int


class Handle:
    """A request that was submitted.

    Iterating, or `async for`, gives its tokens as they are generated. Any number of threads and event loops may
    iterate; each gets all tokens. Raises EngineError if the request failed. `choices` are the handles of the `n`
    sequences of the request; this is the first of them. `times` says when it was submitted, and when its tokens came.
    """

    def __init__(self, request: Request, cancel: Callable[[Request], None]) -> None:
        self.request, self._cancel = request, cancel
        self.times = Times(monotonic())
        self.choices: tuple[Handle, ...] = (self,)
        # Who reads tokens. There is no lock: an iterator may end wherever garbage is collected, also inside of `tell`.
        self._threads: set[SimpleQueue[None]] = set()  # much faster than a Condition
        self._tasks: set[Task] = set()
        self._tokens: list[int] = []
        self._text = ""
        self._error: BaseException | None = None
        self._ended = threading.Event()

    def __iter__(self) -> Iterator[int]:
        news: SimpleQueue[None] = SimpleQueue()
        with self._reading(self._threads, news):
            given, ended = 0, False
            while not ended:
                ended, new = self._ended.is_set(), self._tokens[given:]
                yield from new
                given += len(new)
                if not (new or ended):
                    news.get()
        self._check()

    async def __aiter__(self) -> AsyncIterator[int]:
        given = 0
        async for _ in changes([self]):
            for token in self._tokens[given:]:
                given += 1
                yield token
        self._check()

    def result(self, timeout: float | None = None) -> list[int]:
        """Wait for the end, at most `timeout` seconds, and return all generated tokens. Raises TimeoutError."""
        if not self._ended.wait(timeout):
            raise TimeoutError(f"request {self.request.id} has not ended after {timeout} seconds")
        self._check()
        return list(self._tokens)

    @property
    def finish_reason(self) -> str | None:
        """Why the request ended: "stop" (an end token), "length", "abort" or "error"; None while it runs."""
        return self.request.reason if self._ended.is_set() else None

    @property
    def tokens(self) -> list[int]:
        """The tokens that were generated so far."""
        return list(self._tokens)

    @property
    def text(self) -> str:
        """The text so far, without what may become a part of a stop string; "" if the engine has no tokenizer."""
        return self._text

    @property
    def usage(self) -> Usage:
        """The numbers of tokens so far."""
        request = self.request
        read = request.source.size if request.source.ndim == 1 else 0  # tokens; numbers are none
        return Usage(read or request.prompt_length, len(self._tokens), request.cached, request.accepted)

    @property
    def logprobs(self) -> list[Logprob]:
        """For each token its log-probability, and the likeliest tokens with theirs; empty without `logprobs`."""
        return self.request.logprobs[: len(self._tokens)]

    @property
    def prompt_logprobs(self) -> list[Logprob | None]:
        """The same for each token of the prompt, once there is a generated one; None for the first, which follows
        nothing. Empty without `prompt_logprobs`.
        """
        return list(self.request.prompt_logprobs)

    @property
    def embedding(self) -> np.ndarray[Any, Any]:
        """The vector of a prompt that was embedded, f32[·], once it has ended."""
        return self.request.embedding

    @property
    def logits(self) -> np.ndarray[Any, Any]:
        """What a score head makes of that vector, f32[labels], once it has ended; empty if the model has none."""
        return self.request.logits

    def cancel(self) -> None:
        """End the request now. Tokens that were generated stay. One that has ended stays as it is."""
        self._cancel(self.request)

    @contextmanager
    def _reading(self, readers: set[Any], reader: Any) -> Iterator[None]:
        """Let someone be one of the readers, who are told about each token."""
        self.request.streamed = True
        readers.add(reader)
        try:
            yield
        finally:
            readers.discard(reader)

    def _check(self) -> None:
        if self._error is not None:
            raise EngineError(f"request {self.request.id} failed: {self._error}") from self._error

    def tell(self, ended: bool, error: BaseException | None = None) -> Sequence[Task]:
        """Take over the tokens that there are, and wake threads that wait. Return tasks that do: see `wake`.

        The engine alone calls this, one thread at a time.
        """
        if self._ended.is_set():
            return ()
        self._tokens += self.request.tokens[self.request.prompt_length + len(self._tokens) :]
        if text := self.request.text:
            if ended:
                text.finish()
            self._text = text.shown
        if ended:
            self._error = error
            self._ended.set()
        for news in list(self._threads):
            news.put(None)
        return list(self._tasks)


async def changes(handles: Sequence[Handle], patience: float | None = None) -> AsyncIterator[bool]:
    """Yield at once, then whenever one of the requests has new tokens or has ended, until all have ended.

    Yields True then, and False after each `patience` seconds in which nothing changed.
    """
    changed = asyncio.Event()
    task = asyncio.get_running_loop(), changed
    with ExitStack() as readers:
        for handle in handles:
            readers.enter_context(handle._reading(handle._tasks, task))
        while True:
            changed.clear()
            ended = all(handle.finish_reason for handle in handles)
            yield True
            if ended:
                return
            while not changed.is_set():
                try:
                    async with asyncio.timeout(patience):  # wait_for of Python 3.11 may lose a cancellation
                        await changed.wait()
                except TimeoutError:
                    yield False


def await_others(turn: threading.Condition, patience: float) -> None:
    """Wait while there is news at least every `patience` seconds, five times as long at most. The caller has the turn.

    Requests that begin in one step are all answered sooner than in two.
    """
    latest = monotonic() + 4 * patience
    while turn.wait(patience) and monotonic() < latest:
        pass


def await_news(turn: threading.Condition, has_news: Callable[[], bool], meanwhile: Callable[[], bool]) -> None:
    """Wait until there is news, and call `meanwhile` until it has nothing more to do. The caller has no turn."""
    busy = True
    while True:
        with turn:
            if turn.wait_for(has_news, 0 if busy else WATCH):
                return
        busy = busy and meanwhile()


def wake(tasks: Iterable[Task]) -> None:
    """Set the events of tasks: those of an event loop all at once, as waking it is a system call."""
    events: dict[asyncio.AbstractEventLoop, list[asyncio.Event]] = {}
    for loop, event in tasks:
        events.setdefault(loop, []).append(event)
    for loop, own in events.items():
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(_set, own)


def _set(events: Iterable[asyncio.Event]) -> None:
    for event in events:
        event.set()
