"""The original's sampling functions: sampling from logits on the host, loops over tokens, and other names of `sample`.

The last take a model of this package, and use its `sample`. They also take any object that returns logits when it is
called with ids, cache_ids and start_ids.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from transformers_neuronx.config import token_ids
from transformers_neuronx.config.switches import GenerationConfig
from transformers_neuronx.engine.rules import Rules
from transformers_neuronx.errors import InputError


def validate_top_k_top_p_min_tokens_to_keep(
    top_k: int | None, top_p: float | None, min_tokens_to_keep: int | None
) -> None:
    """Raise InputError unless each argument is None or a value that `top_k_top_p_filtering` takes."""
    if top_k is not None and not (isinstance(top_k, int) and top_k > 0):
        raise InputError(f"top_k must be a whole number above 0, got {top_k!r}")
    if top_p is not None and not (isinstance(top_p, float | int) and 0 < top_p <= 1):
        raise InputError(f"top_p must be a number in (0, 1], got {top_p!r}")
    if min_tokens_to_keep is not None and not (isinstance(min_tokens_to_keep, int) and min_tokens_to_keep >= 0):
        raise InputError(f"min_tokens_to_keep must be a whole number of at least 0, got {min_tokens_to_keep!r}")


def top_k_top_p_filtering(
    scores: torch.Tensor, top_k: int | None, top_p: float | None, min_tokens_to_keep: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `top_k` largest scores in descending order, and their ids: f32[batch, m], s64[batch, m].

    - `scores`: f32[batch, vocab].
    - `top_k`: number of scores to keep, above 0; None keeps all.
    - `top_p`: in (0, 1]. Of those, keep the fewest whose probabilities add up to this; the others become -inf. None
      keeps all.
    - `min_tokens_to_keep`: keep at least this many, whatever `top_k` and `top_p` say. Default 1.

    Raises InputError for a value out of range.
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
    """Sample a token for each row on the host with torch's random numbers. Returns s64[batch, 1].

    - `next_token_scores`: f32[batch, vocab].
    - `top_k`: number of most likely tokens to sample from. Default 1, which is greedy; None is all.
    - `top_p`: in (0, 1]. Of those, keep the fewest whose probabilities add up to this. Default 1.0.
    - `temperature`: above 0; divides the scores. Default 1.0.

    Raises InputError for a value out of range.
    """
    if not temperature > 0:
        raise InputError(f"temperature must be above 0 (for greedy decoding use top_k=1), got {temperature!r}")
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
    """Call `model.sample` with the original's order of arguments. `eos_token_id` is its `eos_token_override`."""
    if not hasattr(model, "sample"):
        first = model(input_ids, cache_ids, start_ids)
        loop = (eos_token_id, top_k, streamer, output_scores)
        return sample_loop(model, input_ids, start_ids, first, sequence_length, *loop)
    where = dict(start_ids=start_ids, cache_ids=cache_ids)
    how = dict(rules=Rules(top_k), eos_token_override=eos_token_id)
    return model.sample(input_ids, sequence_length, streamer=streamer, output_scores=output_scores, **where, **how)


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
    stopping_criteria_list: Any = None,
    no_repeat_ngram_size: int | None = None,
    cache_ids: Any = None,
) -> Any:
    """Call `model.sample` with the original's order of arguments. `eos_token_id` is its `eos_token_override`."""
    if not hasattr(model, "sample"):
        first = model(input_ids, cache_ids, start_ids)
        loop = (eos_token_id, top_k, top_p, temperature, streamer, stopping_criteria_list, no_repeat_ngram_size)
        return sample_loop_llama(model, input_ids, start_ids, first, sequence_length, *loop)
    how = dict(rules=Rules(top_k, top_p, temperature), eos_token_override=eos_token_id)
    more = dict(stopping_criteria_list=stopping_criteria_list, no_repeat_ngram_size=no_repeat_ngram_size)
    where = dict(start_ids=start_ids, cache_ids=cache_ids)
    return model.sample(input_ids, sequence_length, streamer=streamer, **where, **how, **more)


def sample_greedy(model: Any, input_ids: Any, start_ids: Any = None, sequence_length: int = 128) -> Any:
    """Call `model.sample` for greedy tokens, up to `sequence_length` columns; no token ends a row."""
    if not hasattr(model, "sample"):
        return sample_loop(model, input_ids, start_ids, model(input_ids, None, start_ids), sequence_length, -1, 1)
    return model.sample(input_ids, sequence_length, start_ids=start_ids, rules=Rules(1), eos_token_override=-1)


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
    """Call `model.sample` with the rules and end-of-sequence tokens of `config`."""
    config = config or GenerationConfig()
    if not hasattr(model, "sample"):  # it returns tokens
        ends, first = -1 if config.eos_token_id is None else config.eos_token_id, model(input_ids, cache_ids, start_ids)
        return _generate(model, input_ids, start_ids, first, sequence_length, ends, lambda tokens, _: tokens, streamer)
    where = dict(start_ids=start_ids, cache_ids=cache_ids)
    eos = -1 if config.eos_token_id is None else config.eos_token_id
    how = dict(rules=Rules(**config.rules()), eos_token_override=eos)
    return model.sample(input_ids, sequence_length, streamer=streamer, **where, **how)


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
