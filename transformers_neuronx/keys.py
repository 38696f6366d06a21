"""What programs there are, each by a key: what it does, and the sizes that it is compiled for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class What:
    """A program that may be asked for."""


@dataclass(frozen=True)
class Shape(What):
    """A step: rows, active tokens of each, positions that they may look back to. It has logits of each row's last."""

    rows: int
    active: int
    width: int


@dataclass(frozen=True)
class Layerwise(Shape):
    """A step of which every layer is a program of its own, so that what stands between them can be seen and changed."""


@dataclass(frozen=True)
class Head(What):
    """The logits of all tokens of a step, from the hidden states that it has left: rows, active tokens of each."""

    rows: int
    active: int


@dataclass(frozen=True)
class Loop(What):
    """A loop over tokens: positions they may look back to, how many it makes at most."""

    width: int
    steps: int


@dataclass(frozen=True)
class Verify(What):
    """A step with a choice after each token: active tokens, positions they may look back to."""

    active: int
    width: int


@dataclass(frozen=True)
class Choice(What):
    """The choice of tokens alone, from logits for so many rows."""

    rows: int


@dataclass(frozen=True)
class Reorder(What):
    """The exchange of slots."""


class Piece(NamedTuple):
    """A part of the model that one program runs: layers of these kinds, the embedding before them, the head after."""

    embed: bool
    layers: tuple[str, ...]
    head: bool


def title(what: What, piece: Piece) -> str:
    """A program's name for people: loop_width128_steps32."""
    sizes = [f"{name}{value}" for name, value in vars(what).items()]
    parts = ["embed"] * piece.embed + [f"layers{len(piece.layers)}"] * bool(piece.layers) + ["head"] * piece.head
    split = isinstance(what, Shape) and len(parts) == 1
    return "_".join([type(what).__name__.lower(), *sizes, *(parts if split else [])])
