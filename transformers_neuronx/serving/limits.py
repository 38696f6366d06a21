"""The sizes of a step and of the queue."""

from __future__ import annotations

import math
from dataclasses import dataclass

from transformers_neuronx.serving.drafting import Costs


@dataclass(frozen=True)
class Limits:
    """The size of a step and of the queue.

    `tokens` is the most of one step, and `joined` of one while some requests wait for their next token. These are at
    the beginning of a prompt; see `Room` for later ones, which take twice the time at position `doubled`. `rows` is
    the most requests that run at once, `positions` the longest sequence, `guesses` the most draft tokens of a request
    in a step, `rounds` the most tokens that a step generates of each while none waits. `waiting` and `waiting_tokens`
    are the most requests, and tokens of prompts, that may wait. `samples`, at least `rows`, is the most tokens of a
    step after which there are logits. With `costs`, requests get draft tokens only as far as they pay.
    """

    tokens: int
    joined: int
    rows: int
    positions: int
    waiting: int = 4096
    waiting_tokens: int = 2**24
    guesses: int = 0
    rounds: int = 1
    samples: int = 2**24
    doubled: float = math.inf
    costs: Costs | None = None


@dataclass
class Room:
    """Room of a step for `left` tokens at the beginning of a prompt. A later one takes more, as attention takes longer:
    twice as much at position `doubled`, and four times at most.
    """

    left: float
    doubled: float = math.inf

    def tokens(self, start: int) -> int:
        """Return the most tokens of a prompt from position `start` on."""
        return max(math.ceil(self.left / self._weight(start)), 0)

    def take(self, start: int, count: int) -> None:
        self.left -= count * self._weight(start)

    def _weight(self, start: int) -> float:
        return min(1 + start / self.doubled, 4)
