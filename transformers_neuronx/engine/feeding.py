"""Feeds rows of any number of tokens to programs of fixed sizes, and returns logits or sampled tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from transformers_neuronx.config import CompileOptions
from transformers_neuronx.engine.decoder import Decoder, StepInputs
from transformers_neuronx.engine.inputs import Rows
from transformers_neuronx.layers.sampling import NOTHING

Array = np.ndarray[Any, Any]


class Window(NamedTuple):
    """What one dispatch feeds: `now` tokens of each of some rows, after the `fed` earlier ones.

    `rows` [m] are indices of the call's rows, and `lanes` [m] their indices in the program, which has `size` lanes of
    `active` tokens; fed, now [m].
    """

    rows: Array
    lanes: Array
    fed: Array
    now: Array
    size: int
    active: int


def windows(rows: Rows, options: CompileOptions) -> Iterator[Window]:
    """Yield the dispatches for `rows`, in order.

    Prompts are fed in groups of `prompt_batch_size`; the longest row of a group decides its number of windows. Single
    tokens that remain, and rows of one token, are then fed together.
    """
    left = np.array([len(row) for row in rows.tokens])
    fed, slots, prompts = np.zeros_like(left), options.batch_size, options.prompt_batch_size

    def window(members: Array, size: int, active: int) -> Window:
        lanes = rows.slots[members] if size == slots else np.arange(len(members))
        planned = Window(members, lanes, fed[members], np.minimum(left[members], active), size, active)
        fed[members] += planned.now
        left[members] -= planned.now
        return planned

    if options.buckets.context:
        longer = np.arange(len(left)) if prompts == slots else np.flatnonzero(left > 1)
        for group in np.split(longer, range(prompts, len(longer), prompts)):
            while (left[group] > 1).any():
                yield window(group, prompts, options.buckets.active(int(left[group].max())))
    while left.any():
        yield window(np.flatnonzero(left), slots, 1)


def operands(window: Window, rows: Rows, slots: int) -> StepInputs:
    ids = np.zeros((window.size, window.active), np.int64)
    start, length, end = np.zeros((3, window.size), np.int64)
    lanes = window.lanes
    for row, lane, fed, count in zip(window.rows, lanes, window.fed, window.now, strict=True):
        ids[lane, :count] = rows.tokens[row][fed : fed + count]
    start[lanes], length[lanes], end[lanes] = rows.start[window.rows] + window.fed, window.now, rows.end[window.rows]
    where = np.arange(slots) if window.size == slots else np.zeros(window.size, np.int64)
    where[lanes] = rows.slots[window.rows]
    return StepInputs(ids, start, length, end, where)


def feed(decoder: Decoder, rows: Rows, all_positions: bool = False) -> Array:
    """Feed rows. Return logits after the last token of each row, or after all tokens with `all_positions`.

    -> f32[batch, 1 or the longest row, vocab]
    """
    lengths = np.array([len(row) for row in rows.tokens])
    logits = np.zeros((len(lengths), lengths.max() if all_positions else 1, decoder.config.vocab_size), np.float32)
    for window in windows(rows, decoder.options):
        out = decoder.run(operands(window, rows, decoder.slots), all_positions)
        for row, lane, fed, count in zip(window.rows, window.lanes, window.fed, window.now, strict=True):
            if all_positions:
                logits[row, fed : fed + count] = out[lane, :count]
            elif count and fed + count == lengths[row]:
                logits[row] = out[lane]
    return logits


def sample_after(decoder: Decoder, rows: Rows, policy: Array, repeats: int = 1) -> Array:
    """Feed rows, and sample the token after each, or BROKEN; logits stay on the devices. -> s64[batch * repeats]

    policy s32[batch * repeats, POLICY_COLUMNS]. With `repeats`, several are sampled per row, for the slots 0, 1, …
    """
    lengths = np.array([len(row) for row in rows.tokens])
    tokens = np.full((repeats, len(lengths)), NOTHING)
    policy = policy.reshape(repeats, len(lengths), -1)
    for window in windows(rows, decoder.options):
        fed = operands(window, rows, decoder.slots)
        logits = decoder.step(fed)
        ended = (window.now > 0) & (window.fed + window.now == lengths[window.rows])
        members, lanes = window.rows[ended], window.lanes[ended]
        for copy in range(repeats) if members.size else ():
            slots, rules = np.full(window.size, NOTHING), np.zeros((window.size, policy.shape[2]), np.int32)
            slots[lanes], rules[lanes] = rows.slots[members] + copy * len(lengths), policy[copy, members]
            tokens[copy, members] = decoder.sample(logits, slots, fed.end, rules)[lanes]
    return tokens.reshape(-1)


def repeat(decoder: Decoder, prompts: int, repeats: int) -> None:
    """Copy the sequences of the first `prompts` slots to the others, so that each is there `repeats` times."""
    if repeats > 1:
        decoder.reorder(np.tile(np.arange(prompts), repeats))
