"""Where each row of a batch stands: the one input that knows about time, and the cache it writes to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from transformers_neuronx import hlo
from transformers_neuronx.pyhlo import Tensor, dtype_named


@dataclass(frozen=True)
class Step:
    """`n` active tokens for each of `b` rows, right-padded, each row at a position of its own.

    ids s32[b, n]; start s32[b], the position of a row's first active token; length s32[b], how many of them are
    real; end s32[b], the length of a row's sequence once all of it that is at hand has been fed, in this step or in
    later ones; slots s32[b], the cache slot of each row, or None where row i has slot i. `width` is the number of
    positions that any row may look back to.
    """

    ids: Tensor
    start: Tensor
    length: Tensor
    end: Tensor
    slots: Tensor | None
    width: int

    @cached_property
    def positions(self) -> Tensor:
        """The position of every active token. s32[b, n]"""
        return hlo.reshape(self.start, -1, 1) + hlo.iota("s32", self.ids.sizes, 1)

    def last(self, x: Tensor) -> Tensor:
        """Of each row's tokens the last real one. [b, n, ...] -> [b, 1, ...]"""
        b, _, *rest = x.sizes
        return hlo.reshape(hlo.take_rows(x, self.length - 1), b, 1, *rest)


@dataclass(frozen=True)
class Cache:
    """Keys and values of the positions seen so far, of one layer. [slots * kv_heads, positions, head_dim]

    Slots and heads are one axis, the batch of the attention's products: XLA then reads the cache where it lies.
    """

    keys: Tensor
    values: Tensor


def declare_step(parameters: hlo.Parameters, b: int, n: int, width: int, own_slots: bool) -> Step:
    """The step as one parameter, so that one transfer does. s32[b, 4 + n]: slot, start, length, end and ids of rows."""
    packed = parameters.add(dtype_named("s32")[b, 4 + n], "step")
    slots, start, length, end = (hlo.reshape(hlo.slice(packed, 1, i, i + 1), b) for i in range(4))
    return Step(hlo.slice(packed, 1, 4, 4 + n), start, length, end, slots if own_slots else None, width)


def declare_cache(parameters: hlo.Parameters, dtype: str, sizes: Sequence[int], name: str) -> Cache:
    """Keys and values as two parameters."""
    shape = dtype_named(dtype)[sizes]
    return Cache(parameters.add(shape, f"{name}keys"), parameters.add(shape, f"{name}values"))
