"""States: arrays of a sequence that each token replaces, as recurrent and convolutional layers keep them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from transformers_neuronx import hlo
from transformers_neuronx.layers.rows import field
from transformers_neuronx.layers.step import SEQUENCE, Step, located
from transformers_neuronx.layers.storage import put_rows
from transformers_neuronx.pyhlo import Tensor
from transformers_neuronx.weights.splits import Split


class State(NamedTuple):
    """An array that a layer keeps of each sequence, zeros at first: its name, sizes, type, and split over devices."""

    name: str
    sizes: tuple[int, ...]
    dtype: str = "f32"
    split: Split | None = None

    def share(self, degree: int) -> tuple[int, ...]:
        """Sizes on one of `degree` devices."""
        return self.split.share(self.sizes, degree) if self.split else self.sizes


# What each row's token has, [b, ...], and the row's states [b, ...] -> y [b, ...], and the states after the token
Cell = Callable[[list[Tensor], list[Tensor]], tuple[Tensor, list[Tensor]]]


def scan(
    cell: Cell, inputs: Sequence[Tensor], states: Sequence[Tensor], step: Step
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Apply `cell` to the tokens of each sequence in order. Return y [b, n, ...], and the states after the step.

    inputs [b, n, ...], the first with the sizes and the type of y; states [places, ...], of the types that a cell
    makes. A sequence that starts at position 0 starts with zeros. Padding leaves states as they are. The tokens of a
    step run one after the other, which is slow for long prompts.
    """
    return scan_sequences(cell, inputs, states, step.sequences, together=step.segments is None)


def scan_sequences(
    cell: Cell, inputs: Sequence[Tensor], states: Sequence[Tensor], table: Tensor, together: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Do the same, given `Step.sequences`. If they are `together`, a row of inputs is one; else a token is."""
    if not together:
        return _scan_tokens(cell, inputs, states, table)
    count, tokens = field(table, SEQUENCE, "count"), inputs[0].sizes[1]

    def one(i: Tensor, y: Tensor, *before: Tensor) -> list[Tensor]:
        made, after = cell([_row_of(x, 1, i) for x in inputs], list(before))
        kept = [_where(i < count, new, old) for new, old in zip(after, before, strict=True)]
        made = hlo.reshape(made, made.sizes[0], 1, *made.sizes[1:])
        return [i + 1, hlo.dynamic_update_slice(y, made, [_zero(), i, *(_zero() for _ in y.sizes[2:])]), *kept]

    own = [states_before(state, table) for state in states]
    first = [hlo.constant(0, "s32"), hlo.full(0, inputs[0].dtype, inputs[0].sizes), *own]
    _, y, *after = one(*first) if tokens == 1 else hlo.while_loop(lambda i, *_: i < tokens, one, first, tokens)
    return y, tuple(states_after(old, new, table) for old, new in zip(states, after, strict=True))


def _scan_tokens(
    cell: Cell, inputs: Sequence[Tensor], states: Sequence[Tensor], table: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Do the same for a step of single tokens, inputs [b, 1, ...]: a token's state is where the one before left it."""
    b = inputs[0].sizes[0]
    real, sequence, position = located(table, b)
    begins = hlo.equal(hlo.take(field(table, SEQUENCE, "first"), sequence), hlo.iota("s32", [b], 0))
    before, after = (hlo.take(field(table, SEQUENCE, name), sequence) for name in ("before", "after"))
    source = hlo.select(begins, before, after)

    def one(i: Tensor, y: Tensor, *states: Tensor) -> list[Tensor]:
        there, here, place = (_row_of(each, 0, i) for each in (source, after, position))
        fresh, counts = hlo.equal(place, 0), _row_of(real, 0, i)
        old = [_row_of(state, 0, there, keep=True) for state in states]
        old = [hlo.select(fresh, hlo.full(0, each.dtype, each.sizes), each) for each in old]
        made, new = cell([_row_of(x, 0, i) for x in inputs], old)
        written = []
        for state, now in zip(states, new, strict=True):
            there_now = _row_of(state, 0, here, keep=True)
            written.append(put_rows(state, hlo.select(counts, now, there_now), here))
        return [i + 1, put_rows(y, hlo.reshape(made, 1, *y.sizes[1:]), i), *written]

    first = [hlo.constant(0, "s32"), hlo.full(0, inputs[0].dtype, inputs[0].sizes), *states]
    _, y, *left = hlo.while_loop(lambda i, *_: i < b, one, first, b)
    return y, tuple(left)


def states_before(states: Tensor, table: Tensor) -> Tensor:
    """Return the state of each sequence before a step. [places, ...] -> [sequences, ...]"""
    own = hlo.take(states, field(table, SEQUENCE, "before"))
    return _where(hlo.equal(field(table, SEQUENCE, "start"), 0), hlo.full(0, own.dtype, own.sizes), own)


def states_after(states: Tensor, new: Tensor, table: Tensor) -> Tensor:
    """Put the states of sequences after a step, [sequences, ...], into their places, if they have a token there."""
    counts, places = (field(table, SEQUENCE, name) for name in ("count", "after"))
    for row in range(new.sizes[0]):
        here = _scalar(places, row)
        old = _row_of(states, 0, here, keep=True)
        states = put_rows(states, hlo.select(_scalar(counts, row) > 0, hlo.slice(new, 0, row, row + 1), old), here)
    return states


def _row_of(x: Tensor, axis: int, at: Tensor, keep: bool = False) -> Tensor:
    """Return element `at` of an axis, which stays with size 1 if it is to `keep`."""
    where = [at if each == axis else _zero() for each in range(len(x.sizes))]
    found = hlo.dynamic_slice(x, where, [1 if each == axis else size for each, size in enumerate(x.sizes)])
    return found if keep else hlo.reshape(found, *x.sizes[:axis], *x.sizes[axis + 1 :])


def _where(rows: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Choose by row. rows pred[b]"""
    return hlo.select(hlo.reshape(rows, -1, *(1 for _ in new.sizes[1:])), new, old)


def _scalar(x: Tensor, row: int) -> Tensor:
    return hlo.reshape(hlo.slice(x, 0, row, row + 1))


def _zero() -> Tensor:
    return hlo.constant(0, "s32")
