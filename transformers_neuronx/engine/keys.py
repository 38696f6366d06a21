"""Keys of compiled programs: what each does, and the sizes that it is compiled for. A key writes its program."""

from __future__ import annotations

from itertools import groupby
from typing import Any, ClassVar, NamedTuple

from transformers_neuronx.config import CompileOptions
from transformers_neuronx.errors import ConfigError
from transformers_neuronx.pyhlo import HloModuleProto


class ProgramKey:
    """Key of a compiled program: its `kind`, and the sizes it is compiled for as fields."""

    kind: ClassVar[str]
    divides: ClassVar[bool] = False  # whether it may be several programs, of a part of the layers each
    layerwise: ClassVar[bool] = False  # one program per layer, so that states between layers can be read and replaced

    @property
    def name(self) -> str:
        """The key as text, for output and for artifacts: `step_rows1_active32_width128`."""
        return "_".join([self.kind, *(f"{name}{value}" for name, value in vars(self).items())])

    def written(self, programs: Any, segment: Segment) -> HloModuleProto:
        """Write a part of the program, given what all `Programs` of the model have in common."""
        raise NotImplementedError(f"the program {self.name} is not written from a key")

    def layers_each(self, options: CompileOptions) -> int | None:
        """Return how many layers each program has; None for all."""
        return None

    def segments(self, programs: Any) -> list[Segment]:
        """Split the program into parts that run in order: groups of layers between embedding and head."""
        layers = programs.layers
        each = 1 if self.layerwise else self.layers_each(programs.options) or len(layers)
        if each >= len(layers) and not self.layerwise:
            return [programs.whole]
        if programs.config.undivided:
            wanted = "compare logits alone" if self.layerwise else f"unroll must be None or {len(layers)}, got {each}"
            raise ConfigError(f"layers pass each other more than hidden states, so one program has them all: {wanted}")
        parts = [slice(first, first + each) for first in range(0, len(layers), each)]
        groups = [Segment(False, layers[part], False, programs.alike[part]) for part in parts]
        return [Segment(True, (), False), *groups, Segment(False, (), True)]


class Segment(NamedTuple):
    """The part of the model in one program: the kinds of its layers, and whether it has the embedding and the head.

    If layers of a kind are stored in several ways, `alike` has for each layer the first one that is stored alike.
    """

    embed: bool
    layers: tuple[str, ...]
    head: bool
    alike: tuple[int, ...] = ()


def program_name(key: ProgramKey, segment: Segment) -> str:
    """Return a program's readable name: that of its key, and of the segment if a step is several programs."""
    parts = ["embed"] * segment.embed + [f"layers{len(segment.layers)}"] * bool(segment.layers)
    parts += ["head"] * segment.head
    return "_".join([key.name, *(parts if key.divides and len(parts) == 1 else [])])


def artifact_key(key: ProgramKey, segment: Segment, form: str = "") -> str:
    """Return the key of a program in an artifact. Unlike the name, it distinguishes kinds of layers, and caches and
    adapters, whose `form` is that of `Programs`.
    """
    layers = [f"{len([*same])}x{kind or 'layer'}" for kind, same in groupby(segment.layers)]
    stored = ["stored" + ",".join(map(str, segment.alike))] * bool(segment.alike)
    parts = [*["embed"] * segment.embed, *layers, *stored, *["head"] * segment.head]
    return " ".join([key.name, *[form] * bool(form), *parts])
