"""The result of a comparison: numbers, also as JSON and as text of at most 80 columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from transformers_neuronx.analysis.inspection.text import cut

SHOWN = 10  # lines for tokens that differ, and for weights that differ


@dataclass(frozen=True)
class Place:
    """The logits after one token of the text, and the tokens that reference and model would choose next.

    `difference` is the largest, relative to the reference's largest logit anywhere in the text. `kl` is the
    Kullback-Leibler divergence from the reference, in nats. Both probabilities are those of the reference.
    """

    position: int
    difference: float
    kl: float
    wanted: int
    wanted_probability: float
    chosen: int
    chosen_probability: float


@dataclass(frozen=True)
class Part:
    """The embedding, a layer or the head: how much its output differs from the reference's, relative to the norm of
    the hidden state at that position, or of the logits.

    `so_far` includes the errors of all parts before it. `own` is its own error: its input was the reference's hidden
    states. Both are the largest of all positions, and `position` is where `own` is largest.
    """

    name: str
    so_far: float
    own: float
    position: int


@dataclass(frozen=True)
class Changed:
    """A weight on the model's devices, with `count` of `total` numbers that differ from the reference's."""

    name: str
    count: int
    total: int


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`. `weights` is None if the reference's could not be laid out in the same way."""

    model: str
    reference: str
    prompt_tokens: int
    tolerance: float
    places: list[Place]
    parts: list[Part]
    weights: list[Changed] | None

    @property
    def worst(self) -> Place:
        """Where the logits differ most."""
        return max(self.places, key=lambda place: place.difference)

    @property
    def parting(self) -> list[Place]:
        """Where the two would choose different tokens."""
        return [place for place in self.places if place.wanted != place.chosen]

    @property
    def wrong(self) -> list[str]:
        """The parts whose own errors are larger than the tolerance, in order."""
        return [part.name for part in self.parts if part.own > self.tolerance]

    @property
    def agree(self) -> bool:
        """Whether logits and parts are within the tolerance, and no weight is known to differ."""
        return self.worst.difference <= self.tolerance and not self.wrong and not self.weights

    @property
    def divergence(self) -> tuple[float, float]:
        """Mean and largest KL divergence over all places, in nats."""
        kl = [place.kl for place in self.places]
        return sum(kl) / len(kl), max(kl)

    def as_dict(self) -> dict[str, Any]:
        """Return a dictionary for JSON, with None for numbers that are not finite."""
        mean, most = self.divergence
        summary = dict(agree=self.agree, difference=self.worst.difference, kl_mean=mean, kl_max=most, wrong=self.wrong)
        told: dict[str, Any] = _finite(asdict(self) | summary)
        return told

    def __str__(self) -> str:
        return self.text()

    def text(self, shown: Callable[[int], str] = str) -> str:
        """Return the result as text. `shown` formats a token, by default as its number."""
        return "\n".join([*self._logits(shown), "", *self._parts(), *self._weights(), "", *self._verdict()])

    def _logits(self, shown: Callable[[int], str]) -> Iterator[str]:
        count, parting, (mean, most) = len(self.places), self.parting, self.divergence
        yield f"model      {cut(self.model, 69)}"
        yield f"reference  {cut(self.reference, 69)}"
        yield f"text       {self.prompt_tokens} tokens, and {count - self.prompt_tokens} that the reference generates"
        yield ""
        yield f"logits     differ by {self.worst.difference:.1e} of the largest, after token {self.worst.position}"
        yield f"           KL divergence {mean:.1e} on average, {most:.1e} at most"
        yield f"           the most likely token differs at {len(parting)} of {count} places"
        if parting:
            heads = "after", "reference", "its p", "model", "its p", "differ by", "KL"
            yield "  {:>6}  {:18}{:>6}  {:18}{:>6}{:>11}{:>9}".format(*heads)
        for place in parting[:SHOWN]:
            both = (place.wanted, place.wanted_probability), (place.chosen, place.chosen_probability)
            wanted, chosen = (f"  {cut(shown(token), 17):18}{p:>6.1%}" for token, p in both)
            yield f"  {place.position:>6}{wanted}{chosen}{place.difference:>11.1e}{place.kl:>9.1e}"
        yield from _and_more(parting)

    def _parts(self) -> Iterator[str]:
        yield "error of      so far       own  worst after"
        for part in self.parts:
            wrong = "   above the tolerance" if part.name in self.wrong else ""
            yield f"  {part.name:9}{part.so_far:>9.1e}{part.own:>10.1e}{part.position:>13}{wrong}"

    def _weights(self) -> Iterator[str]:
        if not self.weights:
            known = "not compared: layouts differ" if self.weights is None else "equal the reference's, bit by bit"
            yield f"weights    {known}"
            return
        yield "weights that differ from the reference's"
        for weight in self.weights[:SHOWN]:
            yield f"  {cut(weight.name, 40):41}{weight.count} of {weight.total} numbers"
        yield from _and_more(self.weights)

    def _verdict(self) -> Iterator[str]:
        within, apart = f"the tolerance of {self.tolerance:.1e}", self.worst.difference > self.tolerance
        if self.agree:
            yield f"The models agree: nothing is above {within}."
        if apart:
            yield f"The logits differ by more than {within}."
        if len(self.wrong) == 1:
            yield f"{self.wrong[0]} has an error of its own above {within}."
        elif self.wrong:
            yield f"{self.wrong[0]} is the first of {len(self.wrong)} parts with own errors above the tolerance."
        elif apart:
            yield "No part has an error of its own above it."
        if self.weights:
            others = f", the first of {len(self.weights)} weights," if self.weights[1:] else ""
            yield f"{cut(self.weights[0].name, 32)}{others} differs from the reference's."


def _and_more(found: Sequence[Any]) -> Iterator[str]:
    if len(found) > SHOWN:
        yield f"  … and {len(found) - SHOWN} more"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
