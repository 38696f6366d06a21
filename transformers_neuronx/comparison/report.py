"""What a comparison has found: numbers, as JSON, and as text of at most 80 columns. It measures nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from transformers_neuronx.inspection.text import cut

SHOWN = 10  # places where both part, and weights that differ


@dataclass(frozen=True)
class Place:
    """The logits after one token of the text, and the tokens that reference and model would go on with.

    `difference` is the largest, of the largest logit that the reference has anywhere in the text; `kl` the
    Kullback-Leibler divergence from the reference, in nats; both probabilities are those that the reference gives.
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
    """The embedding, a layer or the head: how far what it makes is from what the reference's part makes, of the norm
    of the hidden state at that position, or of the logits.

    `so_far` is with the errors of all parts before it. `own` is its own alone: it was given the reference's hidden
    states. Both are the largest of all positions, and `position` that of the own one.
    """

    name: str
    so_far: float
    own: float
    position: int


@dataclass(frozen=True)
class Changed:
    """A weight on the model's devices, of which `count` of `total` numbers are not those of the reference."""

    name: str
    count: int
    total: int


@dataclass(frozen=True)
class Comparison:
    """What `compare` has found. `weights` is None where those of the reference could not be laid out alike."""

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
        """Where both would go on with another token."""
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
        """The mean and the largest of all places, in nats."""
        kl = [place.kl for place in self.places]
        return sum(kl) / len(kl), max(kl)

    def as_dict(self) -> dict[str, Any]:
        """For JSON, where None stands for what is not finite."""
        mean, most = self.divergence
        summary = dict(agree=self.agree, difference=self.worst.difference, kl_mean=mean, kl_max=most, wrong=self.wrong)
        told: dict[str, Any] = _finite(asdict(self) | summary)
        return told

    def __str__(self) -> str:
        return self.text()

    def text(self, shown: Callable[[int], str] = str) -> str:
        """For people, to whom a token is `shown` as its number, or otherwise."""
        return "\n".join([*self._logits(shown), "", *self._parts(), *self._weights(), "", *self._verdict()])

    def _logits(self, shown: Callable[[int], str]) -> Iterator[str]:
        count, parting, (mean, most) = len(self.places), self.parting, self.divergence
        yield f"model      {cut(self.model, 69)}"
        yield f"reference  {cut(self.reference, 69)}"
        yield f"text       {self.prompt_tokens} tokens, and {count - self.prompt_tokens} that the reference chooses"
        yield ""
        yield f"logits     differ by {self.worst.difference:.1e} of the largest, after token {self.worst.position}"
        yield f"           KL divergence {mean:.1e} on average, {most:.1e} at most"
        yield f"           another token is the likeliest after {len(parting)} of {count}"
        if parting:
            heads = "after", "reference", "its p", "model", "its p", "differ by", "KL"
            yield "  {:>6}  {:18}{:>6}  {:18}{:>6}{:>11}{:>9}".format(*heads)
        for place in parting[:SHOWN]:
            both = (place.wanted, place.wanted_probability), (place.chosen, place.chosen_probability)
            wanted, chosen = (f"  {cut(shown(token), 17):18}{p:>6.1%}" for token, p in both)
            yield f"  {place.position:>6}{wanted}{chosen}{place.difference:>11.1e}{place.kl:>9.1e}"
        yield from _and_more(parting)

    def _parts(self) -> Iterator[str]:
        yield "error of      so far   its own   most after"
        for part in self.parts:
            wrong = "   beyond the tolerance" if part.name in self.wrong else ""
            yield f"  {part.name:9}{part.so_far:>9.1e}{part.own:>10.1e}{part.position:>13}{wrong}"

    def _weights(self) -> Iterator[str]:
        if not self.weights:
            known = (
                "cannot be laid out alike" if self.weights is None else "are the reference's, rounded alike, bit by bit"
            )
            yield f"weights    {known}"
            return
        yield "weights that are not the reference's"
        for weight in self.weights[:SHOWN]:
            yield f"  {cut(weight.name, 40):41}{weight.count} of {weight.total} numbers"
        yield from _and_more(self.weights)

    def _verdict(self) -> Iterator[str]:
        within, apart = f"the tolerance of {self.tolerance:.1e}", self.worst.difference > self.tolerance
        if self.agree:
            yield f"They agree: nothing is beyond {within}."
        if apart:
            yield f"The logits part by more than {within}."
        if len(self.wrong) == 1:
            yield f"{self.wrong[0]} makes an error of its own beyond {within}."
        elif self.wrong:
            yield f"{self.wrong[0]} is the first of {len(self.wrong)} parts with errors of their own beyond it."
        elif apart:
            yield "No part makes such an error of its own."
        if self.weights:
            others = f", the first of {len(self.weights)}" if self.weights[1:] else ""
            yield f"{cut(self.weights[0].name, 40)} is not the reference's{others}."


def _and_more(found: Sequence[Any]) -> Iterator[str]:
    if len(found) > SHOWN:
        yield f"  … and {len(found) - SHOWN} more"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
