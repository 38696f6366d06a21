"""The keys of compiled programs: what each does, and the sizes that it is compiled for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple


class ProgramKey:
    """Key of a compiled program: `kind`, and as fields the sizes it is compiled for."""

    kind: ClassVar[str]

    @property
    def name(self) -> str:
        """The key as text, for people and for artifacts: `step_rows1_active32_width128`."""
        return "_".join([self.kind, *(f"{name}{value}" for name, value in vars(self).items())])


@dataclass(frozen=True)
class StepKey(ProgramKey):
    """A step, which returns logits of each row's last token: rows, active tokens per row, positions to attend to."""

    kind = "step"
    rows: int
    active: int
    width: int


@dataclass(frozen=True)
class LayerwiseKey(StepKey):
    """A step with one program per layer, so that the hidden states between layers can be read and replaced."""

    kind = "layerwise"


@dataclass(frozen=True)
class HeadKey(ProgramKey):
    """Logits of all tokens of a step, from the hidden states that the step returned: rows, active tokens per row."""

    kind = "head"
    rows: int
    active: int


@dataclass(frozen=True)
class LoopKey(ProgramKey):
    """A loop over tokens on the device: positions to attend to, and the most tokens it makes."""

    kind = "loop"
    width: int
    steps: int


@dataclass(frozen=True)
class VerifyKey(ProgramKey):
    """A step that samples after each of its tokens: active tokens, positions to attend to."""

    kind = "verify"
    active: int
    width: int


@dataclass(frozen=True)
class SampleKey(ProgramKey):
    """Sampling alone, from the logits of this many rows."""

    kind = "sample"
    rows: int


@dataclass(frozen=True)
class ReorderKey(ProgramKey):
    """Moving caches between slots."""

    kind = "reorder"


class Segment(NamedTuple):
    """The part of the model in one program: layers of these kinds, and whether embedding and head are in it."""

    embed: bool
    layers: tuple[str, ...]
    head: bool


def program_name(key: ProgramKey, segment: Segment) -> str:
    """A program's name for people: that of its key, and of the segment where a step is several programs."""
    parts = ["embed"] * segment.embed + [f"layers{len(segment.layers)}"] * bool(segment.layers)
    parts += ["head"] * segment.head
    split = isinstance(key, StepKey) and len(parts) == 1
    return "_".join([key.name, *(parts if split else [])])


def artifact_key(key: ProgramKey, segment: Segment) -> str:
    """What an artifact knows a program by. Other than the name, it tells kinds of layers apart."""
    return f"{key.name} {tuple(segment)}"
