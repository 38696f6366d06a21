"""What a checkpoint has after the last norm: an output layer, a classifier's or reward model's score head, or nothing.

A model says so in its configuration, under `OUTPUTS`, which an artifact keeps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from transformers_neuronx.config import OUTPUTS, Configuration
from transformers_neuronx.weights.checkpoint import Checkpoint
from transformers_neuronx.weights.rows import Weight

SCORE = "score"  # the row of a score head
SOURCE = "score.weight"  # its name in checkpoints


@dataclass(frozen=True)
class Outputs:
    """Whether there is an output layer (`head`), and the sizes of a score head, [labels, h], if there is one."""

    head: bool = True
    score: tuple[int, int] | None = None

    @staticmethod
    def of(attributes: Mapping[str, Any]) -> Outputs:
        """Return what a configuration says; by default there is an output layer."""
        told = attributes.get(OUTPUTS) or {}
        labels, width = told.get("score") or (0, 0)
        return Outputs(bool(told.get("head", True)), (int(labels), int(width)) if labels else None)

    @property
    def told(self) -> dict[str, Any]:
        """The same for a configuration, in the types of JSON."""
        return dict(head=self.head, score=self.score and [*self.score])

    def rows(self, table: Sequence[Weight]) -> list[Weight]:
        """Return a family's table for a model with these outputs.

        Without an output layer, the embedding stands in for it: programs stay the same, and it takes no memory. Nobody
        sees its logits.
        """
        rows = list(table)
        if not self.head:
            embedding = next(row for row in rows if row.name == "embed")
            rows = [_instead(row, embedding) if row.name.startswith("head.") else row for row in rows]
        return [*rows, Weight(SCORE, SOURCE, self.score, dtype="f32")] if self.score else rows


def _instead(row: Weight, embedding: Weight) -> Weight:
    if row.shape == embedding.shape:
        return replace(row, source=embedding.source, layout=embedding.layout)
    return replace(row, value=partial(torch.zeros, row.shape))


def outputs_of(checkpoint: Checkpoint, table: Sequence[Weight], prefix: str) -> Outputs:
    """Return what a checkpoint has. One with a score head has no output layer that was trained with it.

    A checkpoint of a bare model, whose names lack `prefix`, may have neither. Another one without an output layer is
    incomplete, which `resolve` says. Reads headers only.
    """
    if SOURCE in checkpoint:
        labels, width = checkpoint.shape(SOURCE)
        return Outputs(False, (labels, width))
    heads = (row for row in table if row.name == "head.weight")
    names = {name for row in heads for full in row.source.split("|") for name in (full, full.removeprefix(prefix))}
    bare = bool(prefix) and not any(name.startswith(prefix) for name in checkpoint)
    return Outputs(head=not (names and bare and checkpoint.names.isdisjoint(names)))


def settled(config: Configuration, checkpoint: Checkpoint | None, table: Sequence[Weight], prefix: str) -> Outputs:
    """Return what a model has, by its checkpoint, and let its configuration say so; without one, what that says."""
    if checkpoint is None:
        return Outputs.of(config.to_dict())
    found = outputs_of(checkpoint, table, prefix)
    config.note(OUTPUTS, found.told)
    return found
