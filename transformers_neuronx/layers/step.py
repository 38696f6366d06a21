"""The active tokens of a batch with their positions, and the cache that they are written to."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

from transformers_neuronx import hlo
from transformers_neuronx.config.sparse_attention import Pattern
from transformers_neuronx.layers.rows import Row, declare_rows, field, row_of
from transformers_neuronx.pyhlo import Tensor, dtype_named


class Spread(NamedTuple):
    """A cache whose positions are dealt out in turn to groups of `devices`, of the model's `degree` in all.

    Device `r` of a group has the positions r, r + devices, r + 2 · devices, …
    """

    devices: int
    degree: int


class Placed(NamedTuple):
    """Rows that stand in place of the embeddings of some tokens, such as those of images, and turned positions.

    rows [b, n, 1 + layers, h]: what a token is instead of its embedding, and what is added to it after each of the
    first layers (DeepStack, arXiv:2406.04334), zeros for others; real pred[b, n], which tokens these are. Rotary
    positions have three parts: of time, height and width. offsets s32[b, n, 3] are what they are more than a token's
    position.
    """

    rows: Tensor
    real: Tensor
    offsets: Tensor


@dataclass(frozen=True)
class Step:
    """`n` active tokens for each of `b` rows, right-padded, each row at its own position.

    ids s32[b, n]; start s32[b], the position of a row's first active token; length s32[b], the number of real tokens
    in a row; end s32[b], the length of a row's sequence after all of its known tokens are fed, in this step or later;
    slots s32[b], the cache slot of each row, or None if row i has slot i. `width` is the number of positions that rows
    may attend to. If attention is sparse, `pattern` tells to which. With `spread`, devices divide the cache. With
    `scatters`, all rows are written to it at once.

    With `segments`, a row is a single token (n = 1), and adjacent rows may be of one sequence, whose cache is in pages.
    segments are rows of `segment_row`. slots are then where sequences have what is not in pages. `places`,
    s32[segments, 2], are these places again, and where states will be: both are needed to keep the old ones until it
    is known which draft tokens are right.

    `needed`, s32[·], are the tokens whose hidden states are read after the last layer, of all b * n. A layer that gets
    some returns no others, in rows of one token; None stands for all, in the same rows. See `needed_rows`.

    `adapters`, s32[b], are the adapters of rows, for linear layers that have some: see `layers.lora`. If a family
    reads images, `placed` is what stands in place of some tokens; None where there are none. If it drafts for another
    model, `features` [b, n, h] are what is known of each token from that model.
    """

    ids: Tensor
    start: Tensor
    length: Tensor
    end: Tensor
    slots: Tensor | None
    width: int
    pattern: Pattern | None = None
    spread: Spread | None = None
    scatters: bool = False
    segments: Tensor | None = None
    places: Tensor | None = None
    adapters: Tensor | None = None
    placed: Placed | None = None
    features: Tensor | None = None
    needed: Tensor | None = None

    @cached_property
    def positions(self) -> Tensor:
        """The position of every active token. s32[b, n]"""
        return hlo.reshape(self.start, -1, 1) + hlo.iota("s32", self.ids.sizes, 1)

    @cached_property
    def near(self) -> Tensor:
        """Which positions `pattern` lets each token attend to, the same in all layers. pred[b, n, width]"""
        assert self.pattern is not None
        rows = hlo.constant(self.pattern.rows(self.width), "pred")
        return hlo.take(rows, hlo.divide(self.positions, self.pattern.block))

    @cached_property
    def sequences(self) -> Tensor:
        """The sequences of the step, as rows of `SEQUENCE`. s32[sequences, 5]"""
        if self.segments is None:
            rows, n = self.ids.sizes
            slots = hlo.iota("s32", [rows]) if self.slots is None else self.slots
            parts = [hlo.iota("s32", [rows]) * n, self.length, self.start, slots, slots]
            return hlo.concatenate([hlo.reshape(part, rows, 1) for part in parts], 1)
        assert self.places is not None
        found = [field(self.segments, SEGMENT, name) for name in ("first", "count", "start")]
        return hlo.concatenate([*(hlo.reshape(part, -1, 1) for part in found), self.places], 1)

    def of_slots(self, x: Tensor) -> Tensor:
        """Gather per-slot values into row order. [slots, ...] -> [b, ...]"""
        return x if self.slots is None else hlo.take(x, self.slots)

    def last(self, x: Tensor) -> Tensor:
        """Take the last real token of each row. [b, n, ...] -> [b, 1, ...]"""
        b, _, *rest = x.sizes
        return hlo.reshape(hlo.take_rows(x, self.length - 1), b, 1, *rest)

    def needed_rows(self, x: Tensor) -> Tensor:
        """Take the tokens that are needed after the layer. [b, n, ...] -> [needed, 1, ...], or x if all are

        Layers do this when keys, values and states of all tokens are made. Attention does it to what it returns.
        """
        if self.needed is None:
            return x
        b, n, *rest = x.sizes
        return hlo.reshape(hlo.take(hlo.reshape(x, b * n, *rest), self.needed), -1, 1, *rest)

    def of_needed(self, x: Tensor) -> Tensor:
        """Take values of rows [b], for each row that `needed_rows` returns. -> [needed] or [b]"""
        return x if self.needed is None else hlo.take(x, hlo.divide(self.needed, self.ids.sizes[1]))

    @property
    def needed_slots(self) -> Tensor | None:
        """`slots`, for each row that `needed_rows` returns."""
        if self.slots is None and self.needed is not None:
            return self.of_needed(hlo.iota("s32", [self.ids.sizes[0]]))
        return self.slots if self.slots is None else self.of_needed(self.slots)


# The cache of one layer: keys and values of the positions so far, [slots * kv_heads, positions, head_dim], and if they
# are quantized, the scales of both, f32[slots * kv_heads, positions, 1]. Keys that are values, too, are there once.
# Slots and heads share one axis, the batch axis of the attention's products, so that XLA reads the cache in place. Then
# come the layer's states, [slots, ...] each.
Cache: TypeAlias = tuple[Tensor, ...]


def step_row(n: int) -> Row:
    """Return the row of a step of `n` active tokens, with the fields of `Step`."""
    return row_of(slot=None, start=None, length=None, end=None, ids=n)


# A sequence in a step of single tokens: its first token among those of the step, their number, the position of the
# first one, and whether they are of a prompt.
SEGMENT = row_of(first=None, count=None, start=None, of_prompt=None)

# A sequence for layers that keep states: as the first three of `SEGMENT`, and the places of its states, before the step
# and after it.
SEQUENCE = row_of(first=None, count=None, start=None, before=None, after=None)


def segment_row(pages: int) -> Row:
    """Return the row of a sequence with its pages: `SEGMENT`, and the numbers of so many."""
    return row_of(first=None, count=None, start=None, of_prompt=None, pages=pages)


def located(segments: Tensor, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return whether each token is of a segment, of which one, and its position. pred[tokens], s32[tokens] twice"""
    count = segments.sizes[0]
    first, length, start = (hlo.reshape(field(segments, SEGMENT, name), -1, 1) for name in ("first", "count", "start"))
    offset = hlo.iota("s32", [count, tokens], 1) - first
    inside = hlo.logical_and(offset >= 0, offset < length)
    segment = hlo.sum(hlo.select(inside, hlo.iota("s32", [count, tokens], 0), 0), 0)
    return hlo.any(inside, 0), segment, hlo.sum(hlo.select(inside, start + offset, 0), 0)


def declare_step(parameters: hlo.Parameters, b: int, n: int, width: int, own_slots: bool) -> Step:
    """Declare the step as one parameter: `b` rows of `step_row(n)`."""
    row = step_row(n)
    packed = declare_rows(parameters, row, b, "step")
    slots, start, length, end, ids = (field(packed, row, name) for name in ("slot", "start", "length", "end", "ids"))
    return Step(ids, start, length, end, slots if own_slots else None, width)


# What `Placed` has of a token besides its row.
PLACE = row_of(real=None, offsets=3)


def declare_placed(parameters: hlo.Parameters, dtype: str, b: int, n: int, sizes: tuple[int, int]) -> Placed:
    """Declare `Placed` as two parameters: the rows, of these `sizes` each, and b * n rows of `PLACE`."""
    rows = parameters.add(dtype_named(dtype)[b, n, *sizes], "placed")
    packed = declare_rows(parameters, PLACE, b * n, "places")
    offsets = hlo.reshape(field(packed, PLACE, "offsets"), b, n, 3)
    return Placed(rows, hlo.reshape(field(packed, PLACE, "real") > 0, b, n), offsets)
