"""The keys of compiled programs: what each does, and the sizes that it is compiled for."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar, NamedTuple

from transformers_neuronx.pyhlo import HloModuleProto


class ProgramKey:
    """Key of a compiled program: its `kind`, and the sizes it is compiled for as fields."""

    kind: ClassVar[str]
    layerwise: ClassVar[bool] = False  # one program per layer, so that states between layers can be read and replaced

    @property
    def name(self) -> str:
        """The key as text, for output and for artifacts: `step_rows1_active32_width128`."""
        return "_".join([self.kind, *(f"{name}{value}" for name, value in vars(self).items())])

    def written(self, programs: Any, segment: Segment) -> HloModuleProto:
        """Write a part of the program with a model's `programs`, for keys that these do not know."""
        raise TypeError(f"no model of this kind has a program {self.name}")


@dataclass(frozen=True)
class StepKey(ProgramKey):
    """A step, which returns logits of each row's last token: rows, active tokens per row, positions to attend to."""

    kind = "step"
    rows: int
    active: int
    width: int


@dataclass(frozen=True)
class LayerwiseKey(StepKey):
    """A step with one program per layer."""

    kind = "layerwise"
    layerwise = True


@dataclass(frozen=True)
class HeadKey(ProgramKey):
    """Logits of all tokens of a step, from the hidden states that the step returned: rows, active tokens per row."""

    kind = "head"
    rows: int
    active: int


@dataclass(frozen=True)
class LoopKey(ProgramKey):
    """A loop over tokens on the device: positions to attend to, and the most tokens it generates."""

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
    """The part of the model in one program: the kinds of its layers, and whether it has the embedding and the head."""

    embed: bool
    layers: tuple[str, ...]
    head: bool


def program_name(key: ProgramKey, segment: Segment) -> str:
    """Return a program's readable name: that of its key, and of the segment if a step is several programs."""
    parts = ["embed"] * segment.embed + [f"layers{len(segment.layers)}"] * bool(segment.layers)
    parts += ["head"] * segment.head
    split = isinstance(key, StepKey) and len(parts) == 1
    return "_".join([key.name, *(parts if split else [])])


def artifact_key(key: ProgramKey, segment: Segment, pages: str = "") -> str:
    """Return the key of a program in an artifact. Unlike the name, it distinguishes kinds of layers, and caches, whose
    `pages` are those of the `CacheLayout`.
    """
    layers = [f"{len([*same])}x{kind or 'layer'}" for kind, same in groupby(segment.layers)]
    return " ".join([key.name, *[pages] * bool(pages), *["embed"] * segment.embed, *layers, *["head"] * segment.head])
