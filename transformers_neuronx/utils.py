"""Helpers around a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def batch_tokenize(
    tokenizer: Any, input_texts: Sequence[str], pad_token: str | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The first two operands of `sample`: ids s64[batch, n] with padding on the left, and start_ids s64[batch].

    start_ids is None where nothing is padding. The tokenizer gets `pad_token`, or its end-of-sequence token if it has
    none of its own.
    """
    if pad_token is not None:
        tokenizer.pad_token = pad_token
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    batch = tokenizer(list(input_texts), return_tensors="pt", padding=True, padding_side="left")
    start_ids = batch.attention_mask.argmax(1)
    return batch.input_ids, start_ids if start_ids.any() else None
