"""Perplexity: among how many equally likely tokens a model seems to choose the next token of a text."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from transformers_neuronx.errors import InputError
from transformers_neuronx.models.sampling import ForSampling
from transformers_neuronx.support.progress import bar


def perplexity(model: ForSampling, ids: Sequence[int], window: int) -> float:
    """Return the perplexity of all tokens after the first, given those before them in windows of `window` tokens.

    The last token of a window is the first of the next one. InputError if there are fewer than two tokens.
    """
    if len(ids) < 2 or window < 2:
        raise InputError(f"perplexity needs windows of 2 tokens or more, got a text of {len(ids)}, and {window}")
    scores = []
    with bar("perplexity", -(-(len(ids) - 1) // (window - 1))) as progress:
        for first in range(0, len(ids) - 1, window - 1):
            scores.append(model.score([list(ids[first : first + window])])[0, 1:])
            progress.update()
    return math.exp(-torch.cat(scores).double().mean().item())
