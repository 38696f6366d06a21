"""From text to text with a compiled model; what is text at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from transformers_neuronx.encoder_decoder import EncoderDecoderForSampling
from transformers_neuronx.errors import InputError
from transformers_neuronx.sampling import ForSampling


def encodable(text: str, what: str) -> str:
    """The text. InputError where it has what no tokenizer takes: half of a character, or a byte that is not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        place = f"\\u{ord(text[error.start]):04x} at character {error.start + 1}"
        raise InputError(f"{what} must be text in UTF-8; got {place}, which is no character") from error
    return text


def complete(model: ForSampling, rows: Sequence[Sequence[int]], count: int, **options: Any) -> list[list[int]]:
    """Up to `count` new tokens of each prompt, its end included. `options` are those of `sample`."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    begun = 1 if isinstance(model, EncoderDecoderForSampling) else width
    made = model.sample(ids, begun + count, attention_mask=mask, **options)[:, begun:]
    return [until_end(row, model.eos_token_ids) for row in made.tolist()]


def until_end(row: list[int], eos: Sequence[int]) -> list[int]:
    """The tokens up to the first that ends a text."""
    return row[: next((place + 1 for place, token in enumerate(row) if token in eos), len(row))]


def room(model: ForSampling, count: int) -> int:
    """How many tokens a prompt may have beside `count` new ones."""
    buckets = model.options.buckets
    return buckets.sources[-1] if buckets.sources else buckets.longest - count
