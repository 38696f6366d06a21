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
from transformers_neuronx.errors import ConfigError
from transformers_neuronx.weights.checkpoint import Checkpoint
from transformers_neuronx.weights.layouts import Layout
from transformers_neuronx.weights.rows import Weight

# Attributes by which logits are more than a product with a row of the output layer, and values that change nothing.
CHANGED = dict(logit_scale=1, logits_scaling=1, lm_head_multiplier=1, final_logit_softcapping=None)
SCORE = "score"  # the row of a score head
SOURCE = "score.weight"  # its name in checkpoints


@dataclass(frozen=True)
class Outputs:
    """Whether there is an output layer (`head`), and the sizes of a score head, [labels, h], if there is one.

    With `score_tokens`, the score head is a row of the output layer, that of the first token, less that of a second.
    """

    head: bool = True
    score: tuple[int, int] | None = None
    score_tokens: tuple[int, ...] = ()

    @staticmethod
    def of(attributes: Mapping[str, Any]) -> Outputs:
        """Return what a configuration says; by default there is an output layer."""
        told = attributes.get(OUTPUTS) or {}
        labels, width = told.get("score") or (0, 0)
        score = (int(labels), int(width)) if labels else None
        return Outputs(bool(told.get("head", True)), score, tuple(map(int, told.get("score_tokens", ()))))

    @property
    def told(self) -> dict[str, Any]:
        """The same for a configuration, in the types of JSON."""
        told = dict(head=self.head, score=self.score and [*self.score])
        return told | (dict(score_tokens=[*self.score_tokens]) if self.score_tokens else {})

    def rows(self, table: Sequence[Weight]) -> list[Weight]:
        """Return a family's table for a model with these outputs.

        Without an output layer, the embedding stands in for it: programs stay the same, and it takes no memory. Nobody
        sees its logits.
        """
        rows = list(table)
        score = [self._score_head(table)] if self.score else []
        if not self.head:
            embedding = next(row for row in rows if row.name == "embed")
            rows = [_instead(row, embedding) if row.name.startswith("head.") else row for row in rows]
        return rows + score

    def _score_head(self, table: Sequence[Weight]) -> Weight:
        assert self.score is not None
        if not self.score_tokens:
            return Weight(SCORE, SOURCE, self.score, dtype="f32")
        head = next(row for row in table if row.name == "head.weight")
        layout = partial(_score_of_tokens, head.layout, self.score_tokens)
        return Weight(SCORE, head.source, self.score, layout, dtype="f32")


def _score_of_tokens(layout: Layout, tokens: Sequence[int], matrix: torch.Tensor) -> torch.Tensor:
    rows = layout(matrix)[[*tokens]].float()
    return rows[:1] - rows[1:].sum(0)


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
    """Return what a model has, by its checkpoint, and let its configuration say so; without one, what that says.

    Raises ConfigError if a score cannot be made of logits of tokens.
    """
    told = Outputs.of(config.to_dict())
    if told.score_tokens:
        found = _of_tokens(told.score_tokens, config.to_dict(), table)
    elif checkpoint is None:
        return told
    else:
        found = outputs_of(checkpoint, table, prefix)
    config.note(OUTPUTS, found.told)
    return found


def _of_tokens(tokens: tuple[int, ...], attributes: Mapping[str, Any], table: Sequence[Weight]) -> Outputs:
    """Return the outputs of a reranker, whose score is the difference of two logits, or one logit."""
    changed = [name for name, same in CHANGED.items() if attributes.get(name) not in (None, same)]
    changed += [row.name for row in table if row.name == "head.bias"]
    if changed:
        raise ConfigError(f"a score by tokens needs an output layer that is only a matrix, got {', '.join(changed)}")
    vocabulary, width = next(row.shape for row in table if row.name == "head.weight")
    if wrong := [token for token in tokens if not 0 <= token < vocabulary]:
        raise ConfigError(f"a score is by tokens from 0 to {vocabulary - 1}, got {wrong[0]}")
    return Outputs(False, (1, width), tokens)
