"""How many draft tokens are worth their time, if they are right as often as those before."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

FADE = 0.9  # what a step leaves of the weight of those before it
FIRST = 4.0  # the weight of what is supposed before the first step
TRIED = 32  # steps without draft tokens, as these do not pay, until each row gets one again


@dataclass(frozen=True)
class Costs:
    """Seconds of steps of up to so many tokens, by ascending `sizes`, and of `drafting` for one of them."""

    sizes: Sequence[int]
    seconds: Sequence[float]
    drafting: float

    def of(self, tokens: int) -> float:
        """Return the seconds of a step; a longer one than those that were measured takes as long for each token."""
        place = bisect_left(self.sizes, tokens)
        return self.seconds[place] if place < len(self.sizes) else self.seconds[-1] * tokens / self.sizes[-1]


class Odds:
    """How often draft tokens were right lately, those that come after a wrong one left out."""

    def __init__(self, chance: float = 0.75) -> None:
        self._right, self._tried = chance * FIRST, FIRST

    @property
    def chance(self) -> float:
        """The share of draft tokens that were right, if those before them were."""
        return self._right / self._tried

    def note(self, guesses: int, right: int) -> None:
        """Take note that the first `right` of some draft tokens were right."""
        self._right = FADE * self._right + right
        self._tried = FADE * self._tried + min(right + 1, guesses)


def worthwhile(costs: Costs, tokens: int, chances: Sequence[float], rooms: Sequence[int]) -> list[int]:
    """Return the numbers of draft tokens of rows with which a step makes the most tokens in its time.

    The step has so many `tokens` without them. Rows' draft tokens are right with these `chances`, and each row has room
    for so many.
    """
    rows = enumerate(zip(chances, rooms, strict=True))
    gains = [(chance**number, row) for row, (chance, room) in rows for number in range(1, room + 1)]
    gains.sort(key=lambda gain: -gain[0])
    made, chosen = float(len(chances)), 0
    best = made / costs.of(tokens)
    for count, (gain, _) in enumerate(gains, 1):
        made += gain
        if (rate := made / (costs.of(tokens + count) + costs.drafting)) > best:
            best, chosen = rate, count
    counts = [0] * len(rooms)
    for _, row in gains[:chosen]:
        counts[row] += 1
    return counts


class Drafting:
    """Decides how many draft tokens rows get: with `costs` only as many as pay, and otherwise all for which there is
    room.
    """

    def __init__(self, costs: Costs | None) -> None:
        self.costs = costs
        self.odds = Odds()  # of all rows
        self._without = 0  # steps since one with draft tokens

    def counts(self, tokens: int, odds: Sequence[Odds | None], rooms: Sequence[int]) -> list[int]:
        """Return the numbers of draft tokens of rows in a step of so many tokens without them. Rows that had none yet
        have no odds.
        """
        if self.costs is None or not any(rooms):
            return [*rooms]
        counts = worthwhile(self.costs, tokens, [(own or self.odds).chance for own in odds], rooms)
        self._without = 0 if any(counts) else self._without + 1
        return counts if self._without < TRIED else [min(room, 1) for room in rooms]

    def noted(self, odds: Odds | None, guesses: int, right: int) -> Odds:
        """Take note that the first `right` of a row's draft tokens were right. Return its odds."""
        odds = odds or Odds(self.odds.chance)
        for each in (odds, self.odds):
            each.note(guesses, right)
        self._without = 0
        return odds
