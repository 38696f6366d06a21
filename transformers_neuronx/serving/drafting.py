"""How many draft tokens are worth their time, if they are right as often as those before."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

FADE = 0.9  # what a step leaves of the weight of those before it
FIRST = 4.0  # the weight of what is supposed before the first step
MOST = 2.0  # times longer, or shorter: a step that differs more from the one before has another reason
CONTROL = 64  # steps with draft tokens, until one without any shows how long that takes
TRIED = 64  # tokens of a row without draft tokens, as these do not pay, until each row gets one again


@dataclass(frozen=True)
class Costs:
    """Seconds of steps of up to so many tokens, by ascending `sizes`, and of `drafting` for one of them."""

    sizes: Sequence[int]
    seconds: Sequence[float]
    drafting: float

    def of(self, tokens: int, drafted: bool = False) -> float:
        """Return the seconds of a step; a longer one than those that were measured takes as long for each token."""
        place = bisect_left(self.sizes, tokens)
        longer = self.seconds[-1] * tokens / self.sizes[-1]
        return (self.seconds[place] if place < len(self.sizes) else longer) + (self.drafting if drafted else 0.0)


class Odds:
    """How often there were draft tokens lately, and how often these were right, those after a wrong one left out."""

    def __init__(self, found: float = 1.0, chance: float = 0.75) -> None:
        self._found, self._sought = found * FIRST, FIRST
        self._right, self._tried = chance * FIRST, FIRST

    @property
    def found(self) -> float:
        """The share of steps with room for draft tokens in which there were some."""
        return self._found / self._sought

    @property
    def chance(self) -> float:
        """The share of draft tokens that were right, if those before them were."""
        return self._right / self._tried

    def gains(self, room: int) -> list[float]:
        """Return how many tokens each of so many draft tokens adds, on average."""
        return [self.found * self.chance**number for number in range(1, room + 1)]

    def note(self, guesses: int, right: int) -> None:
        """Take note that the first `right` of these draft tokens, for which there was room, were right."""
        self._found, self._sought = FADE * self._found + (guesses > 0), FADE * self._sought + 1
        if guesses:
            self._right = FADE * self._right + right
            self._tried = FADE * self._tried + min(right + 1, guesses)


def worthwhile(costs: Costs, tokens: int, gains: Sequence[Sequence[float]], slowdown: float = 1.0) -> list[int]:
    """Return the numbers of draft tokens of rows with which a step makes the most tokens in its time.

    The step has so many `tokens` without them. Each row has room for as many draft tokens as it has `gains`, which say
    how many tokens each of them adds on average, later ones fewer. A step with some takes `slowdown` times its cost.
    """
    each = sorted(((gain, row) for row, own in enumerate(gains) for gain in own), key=lambda gain: -gain[0])
    made, chosen = float(len(gains)), 0
    best = made / costs.of(tokens)
    for count, (gain, _) in enumerate(each, 1):
        made += gain
        if (rate := made / (costs.of(tokens + count, drafted=True) * slowdown)) > best:
            best, chosen = rate, count
    counts = [0] * len(gains)
    for _, row in each[:chosen]:
        counts[row] += 1
    return counts


class Slowdown:
    """How many times longer steps with draft tokens take, as they do not overlap, than measured costs tell beside those
    without. Only steps that follow each other are compared: the machine may be slower at some times than at others.
    """

    def __init__(self) -> None:
        self._mean = 1.0
        self._drafted: bool | None = None  # whether the last step had draft tokens
        self._costs: dict[bool, float] = {}  # what lately steps with and without took, as multiples of their costs

    @property
    def times(self) -> float:
        return max(self._mean, 1.0)

    def note(self, drafted: bool, costs: float) -> None:
        """Take note of how many times its cost a step took, which had room for draft tokens or not."""
        if drafted == self._drafted:
            self._costs[drafted] = FADE * self._costs[drafted] + (1 - FADE) * costs
            return
        self._drafted, self._costs[drafted] = drafted, costs
        if len(self._costs) == 2:
            slower = self._costs[True] / self._costs[False]
            self._mean = FADE * self._mean + (1 - FADE) * min(max(slower, 1 / MOST), MOST)


class Drafting:
    """Decides how many draft tokens rows get: with `costs` only as many as pay, and otherwise all for which there is
    room. `pays` tells whether rows got any when there was room for them last.
    """

    def __init__(self, costs: Costs | None) -> None:
        self.costs = costs
        self.odds = Odds()  # of all rows
        self.pays = True
        self._slowdown = Slowdown()
        self._without = 0  # tokens of a row since there was room for draft tokens
        self._with = 0  # steps that had some since one had none

    def counts(self, tokens: int, odds: Sequence[Odds | None], rooms: Sequence[int]) -> list[int]:
        """Return the numbers of draft tokens of rows in a step of so many tokens without them. Rows that had none yet
        have no odds.
        """
        if self.costs is None or not any(rooms):
            return [*rooms]
        gains = [(own or self.odds).gains(room) for own, room in zip(odds, rooms, strict=True)]
        counts = worthwhile(self.costs, tokens, gains, self._slowdown.times)
        self._without = 0 if any(counts) else self._without + 1
        if self._without >= TRIED:
            counts = [min(room, 1) for room in rooms]
        self.pays = any(counts)
        self._with = self._with % CONTROL + 1 if self.pays else 0
        return counts if self._with < CONTROL else [0] * len(counts)

    def took(self, tokens: int, drafted: bool, seconds: float) -> None:
        """Take note how long a step of so many tokens took, which had room for draft tokens or not."""
        assert self.costs
        self._slowdown.note(drafted, seconds / self.costs.of(tokens, drafted))

    def passed(self, tokens: int) -> None:
        """Take note that rows got so many tokens without draft tokens."""
        self._without += tokens

    def noted(self, odds: Odds | None, guesses: int, right: int) -> Odds:
        """Take note that the first `right` of the draft tokens for which a row had room were right. Return its odds."""
        odds = odds or Odds(self.odds.found, self.odds.chance)
        for each in (odds, self.odds):
            each.note(guesses, right)
        self._without = 0
        return odds
