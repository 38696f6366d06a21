"""Sampling of the next token, row by row. The rules are tensors, so all requests run the same program."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

from transformers_neuronx import hlo
from transformers_neuronx.pyhlo import Tensor

NOTHING, BROKEN = -1, -2  # instead of a token: none was requested; a logit is NaN, or none is finite
CANDIDATES = 256  # rows that sample from at most this many tokens need no pass over the whole vocabulary


@dataclass(frozen=True)
class Policy:
    """Sampling rules of each row, all [b]: top_k s32 (1 is greedy, 0 all tokens), temperature, top_p, min_p and
    repetition_penalty f32, seed and stream u32.

    The draw for a position depends only on seed, stream and position, not on the rest of the batch.
    """

    top_k: Tensor
    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition_penalty: Tensor
    seed: Tensor
    stream: Tensor


POLICY_COLUMNS = len(fields(Policy))
_TYPES = ("s32", "f32", "f32", "f32", "f32", "u32", "u32")


def _unpacked(packed: Tensor) -> Policy:
    rows = packed.sizes[0]
    columns = [hlo.reshape(hlo.slice(packed, 1, i, i + 1), rows) for i in range(POLICY_COLUMNS)]
    return Policy(
        *(c if kind == "s32" else hlo.bitcast_convert(c, kind) for c, kind in zip(columns, _TYPES, strict=True))
    )


def sample(logits: Tensor, seen: Tensor, policy: Tensor, position: Tensor) -> Tensor:
    """Sample each row's token at `position`, or BROKEN.

    logits f32[b, v], seen pred[b, v], policy s32[b, POLICY_COLUMNS], position s32[b] -> s32[b]

    The rules apply in the order of Transformers' processors. The repetition penalty applies to `seen` tokens, then the
    temperature to all. `top_k` keeps the largest, `top_p` the fewest of them with that share of the probability, and
    `min_p` those with that share of the most likely token's probability. Ties at a limit are all kept.
    """
    token: Tensor = _sample(logits, seen, policy, position)
    return token


def _sample_body(logits: Tensor, seen: Tensor, policy: Tensor, position: Tensor) -> Tensor:
    rules = _unpacked(policy)
    likeliest = _likeliest(logits, seen, rules.repetition_penalty)
    greedy = hlo.equal(rules.top_k, 1)

    def drawn() -> Tensor:
        penalized = _penalized(logits, seen, rules.repetition_penalty)
        own = hlo.logical_or(greedy, likeliest < 0)
        return hlo.select(own, likeliest, _drawn(penalized, rules, position))

    return hlo.conditional(hlo.all(greedy, 0), lambda: likeliest, drawn)


_sample = hlo.composite("sample", _sample_body)


def _penalized(logits: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    penalty = _column(penalty)
    return hlo.select(seen, hlo.select(logits < 0.0, logits * penalty, logits / penalty), logits)


def _likeliest(logits: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    """Return each row's most likely token, the first of equals, or BROKEN."""
    sound = hlo.logical_and(hlo.all(hlo.equal(logits, logits), 1), hlo.is_finite(hlo.max(logits, 1)))
    return hlo.select(sound, hlo.argmax(_penalized(logits, seen, penalty), 1), BROKEN)


def _drawn(logits: Tensor, policy: Policy, position: Tensor) -> Tensor:
    def from_all() -> Tensor:
        return _draw(logits, hlo.iota("s32", logits.sizes, 1), policy, position)

    if logits.sizes[1] <= CANDIDATES:
        return from_all()
    few = hlo.all(hlo.logical_and(policy.top_k > 0, policy.top_k <= CANDIDATES), 0)
    return hlo.conditional(few, lambda: _draw(*hlo.top_k(logits, CANDIDATES), policy, position), from_all)


def _draw(logits: Tensor, ids: Tensor, policy: Policy, position: Tensor) -> Tensor:
    """Draw one of `ids` for each row; their order does not matter. logits f32[b, m], ids s32[b, m] -> s32[b]"""
    count = logits.sizes[1]
    logits = logits / _column(policy.temperature)
    keys = _ordered(logits)
    wanted = hlo.select(policy.top_k > 0, hlo.minimum(policy.top_k, count), count)

    def many_enough(key: Tensor) -> Tensor:
        return hlo.sum(hlo.convert(keys >= _column(key), "s32"), 1) >= wanted

    def limit(holds: Callable[[Tensor], Tensor], needed: Tensor) -> Tensor:
        """Search the largest key of each row, if any row needs one: a search takes 32 passes over the logits."""
        search = lambda: _largest(logits.sizes[0], holds)  # noqa: E731
        return hlo.conditional(hlo.any(needed, 0), search, lambda: hlo.full(0, "u32", [logits.sizes[0]]))

    kept = keys >= _column(limit(many_enough, wanted < count))
    weights = hlo.select(kept, hlo.exp(logits - hlo.max(logits, 1, keep=True)), 0.0)
    share = hlo.sum(weights, 1) * policy.top_p

    def heavy_enough(key: Tensor) -> Tensor:
        return hlo.sum(hlo.select(keys >= _column(key), weights, 0.0), 1) >= share

    nucleus = keys >= _column(limit(heavy_enough, policy.top_p < 1.0))
    kept = hlo.logical_and(kept, hlo.logical_or(nucleus, _column(policy.top_p >= 1.0)))
    kept = hlo.logical_and(kept, weights >= _column(policy.min_p))
    bits, _ = hlo.threefry(
        (_column(policy.seed), _column(policy.stream)),
        (_column(hlo.convert(position, "u32")), hlo.convert(ids, "u32")),
    )
    lucky = hlo.argmax(hlo.select(kept, logits + hlo.gumbel(bits), -math.inf), 1)
    return hlo.take_rows(ids, lucky)


def _column(x: Tensor) -> Tensor:
    return hlo.reshape(x, -1, 1)


def _ordered(x: Tensor) -> Tensor:
    """Return u32 keys in the order of the floats."""
    bits = hlo.bitcast_convert(x, "u32")
    negative = bits >= 1 << 31
    return hlo.logical_xor(bits, hlo.select(negative, hlo.full(2**32 - 1, "u32", x.sizes), 1 << 31))


def _largest(rows: int, holds: Callable[[Tensor], Tensor]) -> Tensor:
    """Find each row's largest key for which `holds`: u32[rows] -> pred[rows], true from zero up to that key."""

    def with_next_bit(bit: Tensor, key: Tensor) -> list[Tensor]:
        candidate = hlo.logical_or(key, bit)
        return [hlo.shift_right(bit, 1), hlo.select(holds(candidate), candidate, key)]

    start = [hlo.constant(1 << 31, "u32"), hlo.full(0, "u32", [rows])]
    return hlo.while_loop(lambda bit, _: hlo.not_equal(bit, 0), with_next_bit, start, rounds=32)[1]
