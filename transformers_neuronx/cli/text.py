"""Check text, and complete prompts with a compiled model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from transformers_neuronx.errors import InputError
from transformers_neuronx.models.sampling import ForSampling


def encodable(text: str, what: str) -> str:
    """Return the text. Raises InputError for what no tokenizer takes: a lone surrogate, or a byte that is not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        place = f"\\u{ord(text[error.start]):04x} at character {error.start + 1}"
        raise InputError(f"{what} must be text in UTF-8; got {place}, which is not a character") from error
    return text


def complete(model: ForSampling, rows: Sequence[Sequence[int]], count: int, **options: Any) -> list[list[int]]:
    """Return up to `count` new tokens of each prompt, including its end token. `options` are those of `sample`."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    begun = 1 if model.family.encoder else width
    made = model.sample(ids, begun + count, attention_mask=mask, **options)[:, begun:]
    return [until_end(row, model.eos_token_ids) for row in made.tolist()]


def until_end(row: list[int], eos: Sequence[int]) -> list[int]:
    """Return the tokens up to and including the first end token."""
    return row[: next((place + 1 for place, token in enumerate(row) if token in eos), len(row))]


def room(model: ForSampling, count: int) -> int:
    """Return how many tokens a prompt may have if `count` new ones follow."""
    buckets = model.options.buckets
    return buckets.sources[-1] if buckets.sources else buckets.longest - count
