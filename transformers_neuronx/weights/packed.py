"""A matrix in few bits, as a checkpoint has it: numbers, and the scales by which they are multiplied."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from transformers_neuronx.weights import codes
from transformers_neuronx.weights.layouts import Layout, as_is

# The value that stands for a group's minimum, if it has one. Values of a type in fewer bits begin there.
LEAST = {"s4": -8, "s8": 0}


@dataclass(frozen=True)
class Packed:
    """The matrix `values * scales`, or with minima `(values - LEAST[dtype]) * scales + minima`.

    values [out, in] of type `dtype`, as int8 for s4, and as bytes for the names of `codes.CODES`; scales and minima
    f32[out, groups of `group` inputs each]. The last group may have fewer inputs. In the checkpoint it is `transposed`
    if it is [in, out] there. If inputs stand by group, `order`, s64[in], has the number of each in the checkpoint.
    """

    dtype: str
    values: torch.Tensor
    scales: torch.Tensor
    group: int
    minima: torch.Tensor | None = None
    transposed: bool = False
    order: torch.Tensor | None = None

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

    def laid_out(self, layout: Layout) -> Packed:
        """Return the matrix after a layout that chooses or reorders outputs."""
        if layout is as_is:
            return self

        def applied(values: torch.Tensor) -> torch.Tensor:
            return layout(values.T if self.transposed else values)

        def parts(each: torch.Tensor) -> torch.Tensor:
            return applied(self._of_each(each))[:, :: self.group]

        minima = None if self.minima is None else parts(self.minima)
        values, scales = applied(self.values), parts(self.scales)
        return replace(self, values=values, scales=scales, minima=minima, transposed=False)

    def in_groups(self, group: int | None, parts: torch.Tensor) -> torch.Tensor | None:
        """Return the scale or minimum of each output, f32[out], or of each group of its inputs, f32[out, groups].

        None if a group has several.
        """
        inputs = self.values.shape[1]
        if group is None:
            return parts[:, 0] if self.group >= inputs else None
        if group == self.group:
            return parts
        if self.group < inputs and self.group % group:
            return None
        return self._of_each(parts)[:, ::group]

    def _of_each(self, parts: torch.Tensor) -> torch.Tensor:
        return parts.repeat_interleave(self.group, 1)[:, : self.values.shape[1]]


PackedReaders: TypeAlias = Mapping[str, Callable[[str], Packed]]  # name of a matrix -> what reads it, given that name
Store: TypeAlias = Callable[[torch.Tensor | Packed], torch.Tensor]  # what is stored of a matrix
