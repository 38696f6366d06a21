"""What models without an output layer refuse, and the labels of a score head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers_neuronx.config import CompileOptions
from transformers_neuronx.errors import InputError


def want_head(options: CompileOptions, tag: str, what: str) -> None:
    """Raise InputError if a model has no output layer, and so no logits of tokens, to do `what`."""
    if options.score_tokens:
        raise InputError(
            f"{tag} cannot {what}: it is a reranker, as its checkpoint says (1_LogitScore/config.json), and loads only "
            "rows of its output layer; an Engine's classify() returns its score"
        )
    if not options.head:
        raise InputError(
            f"{tag} cannot {what}: its checkpoint has no output layer (lm_head); an Engine's embed() makes vectors of "
            "prompts, and classify() the logits of a score head"
        )


def want_score(options: CompileOptions, tag: str) -> None:
    """Raise InputError if a model has no score head."""
    if options.score is None:
        able = "it generates, and makes vectors of prompts" if options.head else "an Engine's embed() makes vectors"
        raise InputError(f"{tag} cannot classify: its checkpoint has no score head (score.weight); {able}")


def labels_of(options: CompileOptions, attributes: Mapping[str, Any]) -> list[str]:
    """Return the names of the labels of a score head, as a configuration has them; none without such a head."""
    count, _ = options.score or (0, 0)
    given = {int(number): str(name) for number, name in (attributes.get("id2label") or {}).items()}
    return [given.get(number, f"LABEL_{number}") for number in range(count)]
