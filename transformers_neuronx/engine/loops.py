"""Parts of programs that generate several tokens: the columns of their rows, and the effects of a sampled token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from transformers_neuronx import hlo
from transformers_neuronx.engine.kv_cache import flattened, in_place
from transformers_neuronx.layers.rows import Row, field, row_of
from transformers_neuronx.layers.sampling import NOTHING, POLICY_COLUMNS, sample
from transformers_neuronx.layers.step import Cache, Step
from transformers_neuronx.pyhlo import Tensor

EOS_COLUMNS = 8  # most end-of-sequence tokens per row
# A row of the loop: its token and that one's position, the number of tokens to generate, how they are sampled, and
# which end the row, with -1 where there are fewer.
LOOP = row_of(token=None, position=None, left=None, policy=POLICY_COLUMNS, eos=EOS_COLUMNS)

# A row of sampling alone: its slot, the position of the token that is sampled, and how.
SAMPLE = row_of(slot=None, position=None, policy=POLICY_COLUMNS)


def state_of(packed: Tensor, row: Row = LOOP) -> list[Tensor]:
    """Return what a loop changes of its rows: token, position, and the number of tokens left. s32[b] each"""
    return [field(packed, row, name) for name in ("token", "position", "left")]


def rules_of(packed: Tensor, row: Row = LOOP) -> tuple[Tensor, Tensor]:
    """Return the policy s32[b, POLICY_COLUMNS] and the end-of-sequence tokens s32[b, EOS_COLUMNS] of a loop's rows."""
    return field(packed, row, "policy"), field(packed, row, "eos")


def ends(sampled: Tensor, eos: Tensor) -> Tensor:
    """Whether a row ends: its sampled token s32[b] is an end-of-sequence token, or negative. -> pred[b]"""
    return hlo.logical_or(sampled < 0, hlo.any(hlo.equal(hlo.reshape(sampled, -1, 1), eos), 1))


def _with_tokens_body(seen: Tensor, tokens: Tensor, slots: Tensor | None = None, *, at_once: bool = False) -> Tensor:
    rows = tokens.sizes[0]
    if at_once:  # a negative token is outside, and left out
        own = hlo.iota("s32", [rows]) if slots is None else slots
        return hlo.scatter_rows(seen, side_by_side([own, tokens]), hlo.full(1, "pred", [rows]), (0, 1))
    for row in range(rows):
        token = hlo.slice(tokens, 0, row, row + 1)
        slot = hlo.constant(row, "s32") if slots is None else hlo.reshape(hlo.slice(slots, 0, row, row + 1))
        at = [slot, hlo.maximum(hlo.reshape(token), 0)]
        old = hlo.dynamic_slice(seen, at, [1, 1])
        new = hlo.logical_or(old, hlo.reshape(token >= 0, 1, 1))
        seen = hlo.dynamic_update_slice(seen, new, at)
    return seen


_with_tokens = hlo.composite("with_tokens", _with_tokens_body)


def with_tokens(seen: Tensor, tokens: Tensor, slots: Tensor | None = None, *, at_once: bool = False) -> Tensor:
    """Add each row's token s32[b], below v, to `seen` pred[slots, v], unless it is negative.

    Row i has slot i, or slots[i]. Where no kernel runs, they are written row by row, which XLA:CPU does in place; or
    `at_once` by a scatter, which takes few instructions for many rows, but for which XLA:CPU copies `seen`.
    """
    after: Tensor = _with_tokens(seen, tokens, slots, at_once=at_once)
    return after


def _advance_body(
    sampled: Tensor, token: Tensor, left: Tensor, eos: Tensor, at: Tensor, tokens: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sampled = hlo.select(left > 0, sampled, NOTHING)
    tokens = hlo.dynamic_update_slice(tokens, hlo.reshape(sampled, -1, 1), [hlo.constant(0, "s32"), at])
    left = hlo.select(ends(sampled, eos), 0, left - 1)
    return sampled, hlo.select(sampled < 0, token, sampled), left, tokens


_advance = hlo.composite("advance", _advance_body)


def advance(
    sampled: Tensor, token: Tensor, left: Tensor, eos: Tensor, at: Tensor, tokens: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Note in column `at` of `tokens` what rows sampled: NOTHING if they have no tokens left, as rows that end have.

    sampled, token, left s32[b]; eos s32[b, EOS_COLUMNS]; at s32[]; tokens s32[b, rounds] -> what was noted, the last
    token of each row, how many each has left, and the tokens
    """
    sampled, token, left, tokens = _advance(sampled, token, left, eos, at, tokens)
    return sampled, token, left, tokens


def sampled_after(logits: Tensor, step: Step, seen: Tensor, policy: Tensor) -> list[Tensor]:
    """Sample after each token of a step from logits f32[b, n, v]. Return n tensors s32[b].

    `seen` must include the first token of the step, but none of the others.
    """
    rows, count = step.ids.sizes
    sampled = []
    for column in range(count):
        token = hlo.reshape(hlo.slice(step.ids, 1, column, column + 1), rows)
        seen = with_tokens(seen, token) if column else seen
        here = hlo.reshape(hlo.slice(logits, 1, column, column + 1), rows, -1)
        sampled.append(sample(here, seen, policy, step.start + (column + 1)))
    return sampled


def side_by_side(columns: Sequence[Tensor]) -> Tensor:
    """Join columns s32[b] to s32[b, columns]."""
    return hlo.concatenate([hlo.reshape(column, -1, 1) for column in columns], 1)


def looped(
    condition: Callable[..., Tensor],
    body: Callable[..., list[Tensor]],
    state: list[Tensor],
    caches: list[Cache],
    visible: list[Cache],
    rounds: int | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Add a `while_loop` over `state` and caches. Return the state after it, and the caches in place.

    The loop carries what is `visible` of the caches: cutting at each step would cost more than it saves. `rounds` is
    the number of iterations, if it is known.
    """
    result = hlo.while_loop(condition, body, [*state, *flattened(visible)], rounds)
    flat = flattened(caches)
    after = [
        new if new.sizes == cache.sizes else hlo.dynamic_update_slice(cache, new, [0, 0, 0])
        for new, cache in zip(result[len(state) :], flat, strict=True)
    ]
    return result[: len(state)], in_place(after, flat)
