"""Tokenizer helpers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def batch_tokenize(
    tokenizer_left_padded: Any, input_texts: Sequence[str], pad_token: str | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the first two arguments of `sample`: left-padded ids s64[batch, n], and start_ids s64[batch].

    start_ids is None if there is no padding. The tokenizer's pad token is set to `pad_token`, or to its end-of-sequence
    token if it has no pad token. Whatever its side of padding is, it pads on the left here.
    """
    tokenizer = tokenizer_left_padded
    if pad_token is not None:
        tokenizer.pad_token = pad_token
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    batch = tokenizer(list(input_texts), return_tensors="pt", padding=True, padding_side="left")
    start_ids = batch.attention_mask.argmax(1)
    return batch.input_ids, start_ids if start_ids.any() else None
