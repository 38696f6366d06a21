"""A matrix in few bits, as a checkpoint has it: numbers, and the scales by which they are multiplied."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch

from transformers_neuronx.weights import codes
from transformers_neuronx.weights.layouts import Layout

# The value that stands for a group's minimum, if it has one. Values of a type in fewer bits begin there.
LEAST = {"s4": -8, "s5": -16, "s6": -32, "s8": 0}


class Levels(NamedTuple):
    """Scales or minima in two levels: a whole number for each group of inputs, and its unit, for each block of groups.

    whole s8[out, groups], units f32[out, blocks of `block` inputs each].
    """

    whole: torch.Tensor
    units: torch.Tensor
    block: int

    def numbers(self, group: int) -> torch.Tensor:
        """Return what they are for groups of so many inputs. f32[out, groups]"""
        count = self.block // group
        if self.whole.shape[1] % count:
            return self.whole * self.units.repeat_interleave(count, 1)[:, : self.whole.shape[1]]
        return (torch.unflatten(self.whole, 1, (-1, count)) * self.units.unsqueeze(2)).flatten(1)

    @staticmethod
    def of(numbers: torch.Tensor, group: int, block: int, dtype: torch.dtype) -> Levels:
        """Round f32[out, groups] to whole numbers of units of a type, the largest of a block to 127.

        Scales are rounded up in size, so that the numbers that are divided by them need not be cut off.
        """
        count = block // group
        padded = torch.nn.functional.pad(numbers, (0, -numbers.shape[1] % count))
        blocks = torch.unflatten(padded, 1, (-1, count))
        units = (blocks.abs().amax(2) / 127).to(dtype).float()
        whole = (blocks / torch.where(units == 0, 1, units).unsqueeze(2)).clamp(-127, 127)
        whole = whole.abs().ceil().copysign(whole)
        return Levels(whole.to(torch.int8).flatten(1)[:, : numbers.shape[1]], units, block)


@dataclass(frozen=True)
class Packed:
    """The matrix `values * scales`, or with minima `(values - LEAST[dtype]) * scales + minima`.

    values [out, in] of type `dtype`, as int8 if that has fewer bits, and as bytes for the names of `codes.CODES`;
    scales and minima f32[out, groups of `group` inputs each]. The last group may have fewer inputs. In the checkpoint
    it is `transposed` if it is [in, out] there. If inputs stand by group, `order`, s64[in], has the number of each in
    the checkpoint. `levels` are scales and minima as the checkpoint has them, if that is in two levels; then none are
    given otherwise.
    """

    dtype: str
    values: torch.Tensor
    given_scales: torch.Tensor | None
    group: int
    given_minima: torch.Tensor | None = None
    transposed: bool = False
    order: torch.Tensor | None = None
    levels: tuple[Levels, ...] = ()

    @functools.cached_property
    def scales(self) -> torch.Tensor:
        """The scale of each group. f32[out, groups]"""
        found = self.levels[0].numbers(self.group) if self.levels else self.given_scales
        assert found is not None
        return found

    @functools.cached_property
    def minima(self) -> torch.Tensor | None:
        """What the smallest value of each group stands for, if groups have minima. f32[out, groups]"""
        return self.levels[1].numbers(self.group) if self.levels[1:] else self.given_minima

    @property
    def with_minima(self) -> bool:
        """Whether groups have minima."""
        return self.given_minima is not None or len(self.levels) > 1

    @property
    def numbers(self) -> torch.Tensor:
        """The matrix. f32[out, in]"""
        coded = self.dtype in codes.CODES
        found = codes.numbers(self.values, self.dtype) if coded else self.values.float()
        scales = self._of_each(self.scales)
        if self.minima is None:
            found *= scales
        else:
            found = (found - LEAST[self.dtype]) * scales + self._of_each(self.minima)
        return found if self.order is None else found[:, torch.argsort(self.order)]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes in the checkpoint."""
        return tuple(self.values.T.shape if self.transposed else self.values.shape)

    def outputs(self, numbers: torch.Tensor) -> Packed:
        """Return the matrix of the outputs with these numbers, s64[n]."""
        values = self.values.view(torch.int8)[numbers].view(self.values.dtype)  # torch cannot choose from FP8
        given = [None if each is None else each[numbers] for each in (self.given_scales, self.given_minima)]
        levels = tuple(Levels(whole[numbers], units[numbers], block) for whole, units, block in self.levels)
        return Packed(self.dtype, values, given[0], self.group, given[1], order=self.order, levels=levels)

    def reordered(self, order: torch.Tensor, run: int) -> Packed:
        """Return the matrix with its inputs in another order, s64[in], which keeps each `run` of them: whole groups."""

        def chosen(parts: torch.Tensor | None, size: int) -> Any:
            return None if parts is None else parts[:, order[::size] // size]

        values = self.values.view(torch.int8)[:, order].view(self.values.dtype)
        given = [chosen(each, self.group) for each in (self.given_scales, self.given_minima)]
        levels = []
        for whole, units, block in self.levels:
            size = math.gcd(block, run)
            levels.append(
                Levels(chosen(whole, self.group), chosen(units.repeat_interleave(block // size, 1), size), size)
            )
        return replace(self, values=values, given_scales=given[0], given_minima=given[1], levels=tuple(levels))

    def in_groups(self, group: int | None, parts: torch.Tensor | None, size: int | None = None) -> torch.Tensor | None:
        """Return the scale or minimum of each output, f32[out], or of each group of its inputs, f32[out, groups].

        `parts` are those of groups of `size` inputs, by default the matrix's. None if they are None, or if a group has
        several.
        """
        inputs, size = self.values.shape[1], size or self.group
        if parts is None:
            return None
        if group is None:
            return parts[:, 0] if size >= inputs else None
        count = -(-inputs // group)
        if size % group == 0:
            return parts if group == size else parts.repeat_interleave(size // group, 1)[:, :count]
        return parts.expand(-1, count) if size >= inputs else None

    def _of_each(self, parts: torch.Tensor) -> torch.Tensor:
        return parts.repeat_interleave(self.group, 1)[:, : self.values.shape[1]]


@dataclass(frozen=True)
class Unread:
    """A matrix in few bits of `sizes` [out, in] whose outputs are read when they are asked for.

    `outputs` returns the matrix of the outputs with the given numbers, s64[n].
    """

    sizes: tuple[int, int]
    outputs: Callable[[torch.Tensor], Packed]
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes in the checkpoint."""
        return self.sizes[::-1] if self.transposed else self.sizes

    def whole(self) -> Packed:
        return replace(self.outputs(torch.arange(self.sizes[0])), transposed=self.transposed)


def chosen(matrix: Packed | Unread, layout: Layout) -> torch.Tensor:
    """Return the number of each output of a matrix after a layout that chooses or reorders them. s64[n]"""
    sizes = matrix.values.shape if isinstance(matrix, Packed) else matrix.sizes
    numbers = torch.arange(sizes[0]).unsqueeze(1)
    return layout(numbers.T if matrix.transposed else numbers)[:, 0]


# From the name of a matrix to what reads it, given that name.
PackedReaders: TypeAlias = Mapping[str, Callable[[str], Packed | Unread]]
Store: TypeAlias = Callable[[torch.Tensor | Packed], torch.Tensor]  # what is stored of a matrix
