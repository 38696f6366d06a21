"""The original's functions for sampling: the choice of tokens from logits on the host, and `sample` by other names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from transformers_neuronx.errors import InputError
from transformers_neuronx.switches import GenerationConfig


def validate_top_k_top_p_min_tokens_to_keep(
    top_k: int | None, top_p: float | None, min_tokens_to_keep: int | None
) -> None:
    """Raise InputError unless the three are what `top_k_top_p_filtering` takes, or None."""
    if top_k is not None and not (isinstance(top_k, int) and top_k > 0):
        raise InputError(f"top_k wants a whole number above 0, got {top_k!r}")
    if top_p is not None and not (isinstance(top_p, float | int) and 0 < top_p <= 1):
        raise InputError(f"top_p wants a number above 0 and at most 1, got {top_p!r}")
    if min_tokens_to_keep is not None and not (isinstance(min_tokens_to_keep, int) and min_tokens_to_keep >= 0):
        raise InputError(f"min_tokens_to_keep wants a whole number of at least 0, got {min_tokens_to_keep!r}")


def top_k_top_p_filtering(
    scores: torch.Tensor, top_k: int | None, top_p: float | None, min_tokens_to_keep: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `top_k` largest scores in order, and their ids. scores f32[batch, vocab] -> f32[batch, m], s64[batch, m]

    Those after the fewest that have the probability `top_p` are -inf, but at least `min_tokens_to_keep` stay.
    """
    validate_top_k_top_p_min_tokens_to_keep(top_k, top_p, min_tokens_to_keep)
    vocab = scores.shape[1]
    values, ids = scores.topk(min(vocab if top_k is None else max(top_k, min_tokens_to_keep), vocab))
    if top_p is not None and top_p < 1:
        share = values.softmax(1, dtype=torch.float32)
        late = share.cumsum(1) - share >= top_p
        late[:, : max(min_tokens_to_keep, 1)] = False
        values = values.masked_fill(late, -math.inf)
    return values, ids


def select_tokens(
    next_token_scores: torch.Tensor, top_k: int | None = 1, top_p: float | None = 1.0, temperature: float = 1.0
) -> torch.Tensor:
    """A token for each row, drawn on the host. next_token_scores f32[batch, vocab] -> s64[batch, 1]"""
    if not temperature > 0:
        raise InputError(f"temperature wants to be above 0 (greedy choice is top_k=1), got {temperature!r}")
    values, ids = top_k_top_p_filtering(next_token_scores / temperature, top_k, top_p)
    return ids.gather(1, torch.multinomial(values.softmax(1, dtype=torch.float32), 1))


def simple_sample(
    model: Any,
    input_ids: Any,
    start_ids: Any,
    sequence_length: int,
    eos_token_id: int | Sequence[int] = 2,
    top_k: int = 50,
    streamer: Any = None,
    output_scores: bool = False,
    cache_ids: Any = None,
) -> Any:
    """`model.sample` with this order of arguments."""
    where = dict(start_ids=start_ids, cache_ids=cache_ids)
    rules = dict(top_k=top_k, eos_token_override=eos_token_id)
    return model.sample(input_ids, sequence_length, streamer=streamer, output_scores=output_scores, **where, **rules)


def sample_llama(
    model: Any,
    input_ids: Any,
    start_ids: Any,
    sequence_length: int,
    eos_token_id: int | Sequence[int] = 2,
    top_k: int = 50,
    top_p: float = 1.0,
    temperature: float = 1.0,
    streamer: Any = None,
    **options: Any,
) -> Any:
    """`model.sample` with this order of arguments."""
    rules = dict(top_k=top_k, top_p=top_p, temperature=temperature, eos_token_override=eos_token_id)
    return model.sample(input_ids, sequence_length, start_ids=start_ids, streamer=streamer, **rules, **options)


def sample_greedy(model: Any, input_ids: Any, start_ids: Any = None, sequence_length: int = 128) -> Any:
    """The likeliest tokens, up to `sequence_length` whatever they are."""
    return model.sample(input_ids, sequence_length, start_ids=start_ids, top_k=1, eos_token_override=-1)


def sample_tokens(
    model: Any,
    input_ids: Any,
    start_ids: Any = None,
    *,
    sequence_length: int = 128,
    config: GenerationConfig | None = None,
    streamer: Any = None,
    cache_ids: Any = None,
) -> Any:
    """`model.sample` by the rules of `config`."""
    config = config or GenerationConfig()
    where = dict(start_ids=start_ids, cache_ids=cache_ids)
    eos = -1 if config.eos_token_id is None else config.eos_token_id
    return model.sample(
        input_ids, sequence_length, streamer=streamer, eos_token_override=eos, **where, **config.rules()
    )
