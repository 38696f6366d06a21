"""Handles of requests: what callers see of them, in threads and event loops."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from typing import NamedTuple

from transformers_neuronx.errors import EngineError
from transformers_neuronx.serving.request import Logprob, Request


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
    sequences of the request; this is the first of them.
    """

    def __init__(self, request: Request, cancel: Callable[[Request], None]) -> None:
        self.request, self._cancel = request, cancel
        self.choices: tuple[Handle, ...] = (self,)
        turn = threading.Lock()
        self._changed, self._finished = threading.Condition(turn), threading.Condition(turn)
        self._waiters: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()
        self._tokens: list[int] = []
        self._text = ""
        self._ended = False
        self._error: BaseException | None = None

    def __iter__(self) -> Iterator[int]:
        self.request.streamed = True
        given = 0
        while new := self._after(given):
            yield from new
            given += len(new)
        self._check()

    async def __aiter__(self) -> AsyncIterator[int]:
        self.request.streamed = True
        waiter = asyncio.get_running_loop(), asyncio.Event()
        with self._changed:
            self._waiters.add(waiter)
        try:
            place = 0
            while True:
                waiter[1].clear()
                while place < len(self._tokens):
                    yield self._tokens[place]
                    place += 1
                if self._ended and place == len(self._tokens):
                    self._check()
                    return
                await waiter[1].wait()
        finally:
            with self._changed:
                self._waiters.discard(waiter)

    def result(self, timeout: float | None = None) -> list[int]:
        """Wait for the end, at most `timeout` seconds, and return all generated tokens. Raises TimeoutError."""
        with self._finished:  # waking up for each token would cost the engine time
            if not self._finished.wait_for(lambda: self._ended, timeout):
                raise TimeoutError(f"request {self.request.id} has not ended after {timeout} seconds")
        self._check()
        return list(self._tokens)

    @property
    def finish_reason(self) -> str | None:
        """Why the request ended: "stop" (an end token), "length", "abort" or "error"; None while it runs."""
        return self.request.reason if self._ended else None

    @property
    def text(self) -> str:
        """The text so far, without what may become a part of a stop string; "" if the engine has no tokenizer."""
        return self._text

    @property
    def usage(self) -> Usage:
        """The numbers of tokens so far."""
        request = self.request
        return Usage(len(request.source) or request.prompt_length, len(self._tokens), request.cached, request.accepted)

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

    def cancel(self) -> None:
        """End the request now. Tokens that were generated stay. One that has ended stays as it is."""
        self._cancel(self.request)

    def _after(self, given: int) -> list[int]:
        """Wait for tokens after the first `given`, and return them; none if the request has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or len(self._tokens) > given)
            return self._tokens[given:]

    def _check(self) -> None:
        if self._error is not None:
            raise EngineError(f"request {self.request.id} failed: {self._error}") from self._error

    def tell(self, ended: bool, error: BaseException | None = None) -> None:
        """Take over the tokens that there are, and wake all who wait. The engine alone calls this."""
        with self._changed:
            if self._ended:
                return
            self._tokens += self.request.tokens[self.request.prompt_length + len(self._tokens) :]
            if text := self.request.text:
                if ended and self.request.reason != "stop":
                    text.finish()
                self._text = text.shown
            self._ended, self._error = ended, error
            self._changed.notify_all()
            if ended:
                self._finished.notify_all()
            for loop, event in self._waiters:
                with suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(event.set)
