"""A matrix in few bits, as a checkpoint has it: numbers, and the scales by which they are multiplied."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from transformers_neuronx.weights.layouts import Layout, as_is


@dataclass(frozen=True)
class Packed:
    """The matrix `values * scales`: values [out, in] of type `dtype`, scales f32[out, groups of `group` inputs each].

    The last group may have fewer inputs.
    """

    dtype: str
    values: torch.Tensor
    scales: torch.Tensor
    group: int

    @property
    def numbers(self) -> torch.Tensor:
        """The matrix. f32[out, in]"""
        return self.values.float() * self._scale_of_each()

    def laid_out(self, layout: Layout) -> Packed:
        """Return the matrix after a layout that chooses or reorders outputs."""
        if layout is as_is:
            return self
        scales = layout(self._scale_of_each())[:, :: self.group]
        return replace(self, values=layout(self.values), scales=scales)

    def in_groups(self, group: int | None) -> torch.Tensor | None:
        """Return the scale of each output, f32[out], or of each group of its inputs, f32[out, groups].

        None if a group has several scales.
        """
        inputs = self.values.shape[1]
        if group is None:
            return self.scales[:, 0] if self.group >= inputs else None
        if group == self.group:
            return self.scales
        if self.group < inputs and self.group % group:
            return None
        return self._scale_of_each()[:, ::group]

    def _scale_of_each(self) -> torch.Tensor:
        inputs = self.values.shape[1]
        return self.scales.repeat_interleave(self.group, 1)[:, :inputs]


PackedReaders: TypeAlias = Mapping[str, Callable[[str], Packed]]  # name of a matrix -> what reads it, given that name
Store: TypeAlias = Callable[[torch.Tensor | Packed], torch.Tensor]  # what is stored of a matrix
