"""The loop over steps: plans a step, runs it, and records its tokens, for one thread at a time.

It knows neither threads nor handles. Whoever calls `advance` again and again has the model meanwhile: the thread of an
`Engine`, or a call such as `sample()`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

from transformers_neuronx.errors import EngineError
from transformers_neuronx.layers.sampling import BROKEN
from transformers_neuronx.serving.adapters import HostAdapter
from transformers_neuronx.serving.choices import Changes, Chosen
from transformers_neuronx.serving.guesses import Compiled, Guesser, with_guesses
from transformers_neuronx.serving.kv_cache import Copy
from transformers_neuronx.serving.request import Request
from transformers_neuronx.serving.scheduler import Scheduler, Work


class Steps(Compiled, Protocol):
    """Runs the steps of a model, over pages or over slots."""

    @property
    def overlaps(self) -> bool:
        """Whether a step can start before the tokens of the one before are read."""
        ...

    @property
    def embeds(self) -> bool:
        """Whether hidden states of requests can be pooled."""
        ...

    def reset(self) -> None:
        """Forget all sequences."""
        ...

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copy pages of the cache, in order."""
        ...

    def load(self, adapters: Sequence[HostAdapter]) -> None:
        """Bring adapters to their places on the devices."""
        ...

    def encode(self, requests: Sequence[Request]) -> None:
        """Encode the sources of requests."""
        ...

    def pack(self, step: Sequence[Work]) -> Any:
        """Bring a step into the form of its programs."""
        ...

    def start(self, packed: Any) -> Any:
        """Start a step. Returns before its results are there."""
        ...

    def changes(self, packed: Any) -> Changes | None:
        """Return how logits change before tokens are chosen, if they do. All tokens before must be known."""
        ...

    def choose(self, started: Any, changes: Changes | None) -> Chosen:
        """Return the tokens of the step that was started last."""
        ...


class Begun(NamedTuple):
    """A step that was started, whose tokens are not chosen yet."""

    step: list[Work]
    packed: Any
    started: Any


class Flight(NamedTuple):
    """A step whose results are not read yet."""

    step: list[Work]
    chosen: Chosen


class Loop:
    """Computes the requests of a scheduler. Who has the `turn` may change the scheduler."""

    def __init__(
        self,
        steps: Steps,
        scheduler: Scheduler,
        guesser: Guesser | None = None,
        turn: AbstractContextManager[Any] | None = None,
    ) -> None:
        self.steps, self.scheduler, self.guesser = steps, scheduler, guesser
        self._turn = nullcontext() if turn is None else turn
        self._begun: Begun | None = None
        self._flying: Flight | None = None
        self._finished: list[list[Work]] = []  # by the last call of `finish`

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self._begun and not self._flying and not len(self.scheduler)

    @property
    def begun(self) -> Sequence[Work]:
        """The step that was started last, until its tokens are chosen."""
        return self._begun.step if self._begun else ()

    def advance(self) -> list[Request]:
        """Start a step, and finish one: see `start` and `finish`."""
        self.start()
        return self.finish()

    def start(self) -> None:
        """Start a step, if something can run. The one before may still run: devices do not wait for planning."""
        with self._turn:
            if step := self.scheduler.schedule():
                packed = self._packed(step)
        if step:
            started = self.steps.start(packed)
            self._begun = Begun(step, packed, started)
            if self.guesser:
                self.guesser.follow(step, started)

    def finish(self) -> list[Request]:
        """Finish the step before the one that was started; this one, too, unless the next `overlaps` it.

        Return the requests that the finished steps sampled. One that failed has an `error`.
        """
        self._finished = []
        sampled = self._finish()
        if begun := self._begun:
            with self._turn:
                changes = self.steps.changes(begun.packed)
            self._begun, self._flying = None, Flight(begun.step, self.steps.choose(begun.started, changes))
        if self.steps.overlaps and self.scheduler.overlaps:
            return sampled
        return sampled + self._finish()

    def took(self, seconds: float) -> None:
        """Take note how long after the step before it the last one was finished."""
        if len(self._finished) == 1 and not (self.guesser and self.guesser.behind):
            self.scheduler.took(self._finished[0], seconds)

    def _packed(self, step: list[Work]) -> Any:
        """Bring a step into the form of its programs, after what must come before it."""
        self.steps.copy(self.scheduler.copies)
        self.steps.load(self.scheduler.adapters.loads)
        self.steps.encode([work.request for work in step if work.request.source.size and not work.start])
        if self.guesser:
            self.guesser.copy(self.scheduler.copies)
            step[:] = with_guesses(step, self.guesser)
        return self.steps.pack(step)

    def _finish(self) -> list[Request]:
        """Wait for the step that was started, and record its tokens. Return the requests that sampled."""
        flying, self._flying = self._flying, None
        if flying is None:
            return []
        tokens = flying.chosen.read()
        self._finished.append(flying.step)
        sampling = [work.request for work in flying.step if work.samples or work.pools]
        with self._turn:
            for request in sampling:
                if BROKEN in tokens.get(request.id, ()):
                    request.error = EngineError("its logits are NaN or all -inf")
                if request.error:
                    self.scheduler.abort(request, "error")
            self.scheduler.update(flying.step, tokens)
        return sampling

    def forget(self) -> None:
        """Forget the step that was started, and what the caches hold. Who has the turn must also end all requests."""
        self._begun = self._flying = None
        self.scheduler.cache.forget()
        self.scheduler.adapters.forget()

    def reset(self) -> None:
        """Empty the caches on the devices, after `forget` and before the next step."""
        self.steps.reset()
        if self.guesser:
            self.guesser.reset()
