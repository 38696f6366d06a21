"""The original's sampling loops on the host, for any model that returns logits for ids, cache_ids and start_ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from transformers_neuronx.config import token_ids
from transformers_neuronx.errors import InputError
from transformers_neuronx.sampling_functions import select_tokens


def validate_no_repeat_ngram_size(ngram_size: int | None) -> None:
    """Raise InputError unless the size is None or a whole number above 0."""
    if ngram_size is not None and not (isinstance(ngram_size, int) and ngram_size > 0):
        raise InputError(f"no_repeat_ngram_size must be a whole number above 0, got {ngram_size!r}")


def filter_ngrams(
    ngram_size: int, input_ids: torch.Tensor, next_token_scores: torch.Tensor, cur_len: int
) -> torch.Tensor:
    """Return the scores with -inf for tokens that would repeat an n-gram of a row's first `cur_len` ids."""
    from transformers import NoRepeatNGramLogitsProcessor  # takes a second to import

    validate_no_repeat_ngram_size(ngram_size)
    return NoRepeatNGramLogitsProcessor(ngram_size)(input_ids[:, :cur_len], next_token_scores)  # type: ignore[no-any-return]


def sample_loop(
    model: Any,
    input_ids: torch.Tensor,
    start_ids: torch.Tensor | None,
    next_token_scores: torch.Tensor,
    sequence_length: int,
    eos_token_id: int | Sequence[int] = 2,
    top_k: int = 50,
    streamer: Any = None,
    output_scores: bool = False,
    neuron_config: Any = None,
    log_softmax_scores: Any = None,
    cache_ids: torch.Tensor | None = None,
) -> Any:
    """Generate tokens after a prompt whose logits are `next_token_scores`, f32[batch, vocab].

    Returns ids s64[batch, sequence_length], and the scores with `output_scores`. Other arguments are as in `sample`;
    a row repeats its end-of-sequence token after it. `neuron_config` and `log_softmax_scores` have no effect.
    """
    scores: list[torch.Tensor] = []

    def choose(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        scores.append(logits)
        return select_tokens(logits, top_k)

    ids = _generate(model, input_ids, start_ids, next_token_scores, sequence_length, eos_token_id, choose, streamer)
    return (ids, scores) if output_scores else ids


def sample_loop_llama(
    model: Any,
    input_ids: torch.Tensor,
    start_ids: torch.Tensor | None,
    next_token_scores: torch.Tensor,
    sequence_length: int,
    eos_token_id: int | Sequence[int] = 2,
    top_k: int = 50,
    top_p: float = 1.0,
    temperature: float = 1.0,
    streamer: Any = None,
    stopping_criteria_list: Callable[..., Any] | None = None,
    ngram_size: int | None = None,
    cache_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """Do the same as `sample_loop`, with more rules. All rows end where `stopping_criteria_list` returns true."""

    def choose(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        logits = filter_ngrams(ngram_size, ids, logits, ids.shape[1]) if ngram_size else logits
        return select_tokens(logits, top_k, top_p, temperature or 1.0)

    return _generate(
        model, input_ids, start_ids, next_token_scores, sequence_length, eos_token_id, choose, streamer,
        stopping_criteria_list,
    )  # fmt: skip


def _generate(
    model: Any,
    ids: torch.Tensor,
    start_ids: torch.Tensor | None,
    logits: torch.Tensor,
    length: int,
    eos: int | Sequence[int],
    choose: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    streamer: Any,
    stops: Callable[..., Any] | None = None,
) -> torch.Tensor:
    ends = torch.tensor(token_ids(eos))
    ended = torch.zeros(len(ids), 1, dtype=torch.bool)
    for column in range(ids.shape[1], length):
        tokens = choose(logits, ids)
        tokens = torch.where(ended, ends[0], tokens) if len(ends) else tokens
        ids = torch.cat([ids, tokens], 1)
        if streamer is not None:
            streamer.put(tokens)
        ended |= torch.isin(tokens, ends)
        if ended.all() or (stops is not None and torch.as_tensor(stops(ids, logits)).all()) or column + 1 == length:
            break
        logits = model(tokens, torch.tensor([column], dtype=torch.int32), start_ids)
    if streamer is not None:
        streamer.end()
    return ids
