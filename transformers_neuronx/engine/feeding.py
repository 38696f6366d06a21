"""Rows of any number of tokens become rectangles of the sizes that programs have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from transformers_neuronx.config import CompileOptions
from transformers_neuronx.engine.images import Pictured
from transformers_neuronx.engine.inputs import Rows

Array = np.ndarray[Any, Any]


class StepInputs(NamedTuple):
    """What a step feeds: `length[i]` tokens of `ids[i]` to slot `slots[i]`, from position `start[i]` on.

    ids s32[b, n], where n is a context bucket or 1; the others s32[b]. A row of length 0 changes nothing. `end[i]` is
    the position after the row's last token; it is past this step if the row is fed in several steps. `prompts` are
    those with images, None for other rows; nothing if no row has any.
    """

    ids: Array
    start: Array
    length: Array
    end: Array
    slots: Array
    prompts: Sequence[Pictured | None] = ()


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
    prompts: list[Pictured | None] = [None] * window.size
    for row, lane in zip(window.rows, lanes, strict=True):
        prompts[lane] = rows.pictured(row)
    return StepInputs(ids, start, length, end, where, prompts)
