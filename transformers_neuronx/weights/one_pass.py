"""Arrays that devices have of a matrix, made in one pass over its outputs.

A matrix in few bits is several arrays: values, scales, and maybe more. A few outputs are read, stored in each of the
arrays, and put into their places; then the next. So what is in between stays in a core's cache, and no whole matrix is
in memory besides the arrays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from transformers_neuronx.weights import panels
from transformers_neuronx.weights.layouts import Layout
from transformers_neuronx.weights.packed import Packed, Store, Unread, chosen
from transformers_neuronx.weights.splits import Split

AT_ONCE = 2**22  # numbers that are stored at once

_Read = Callable[[torch.Tensor], torch.Tensor | Packed]  # outputs, by their numbers


class Stored(NamedTuple):
    """An array that is stored of a matrix: what makes it, how it is split, and a device's shape, word and type."""

    store: Store
    split: Split | None
    shape: tuple[int, ...]
    word: int | None
    dtype: torch.dtype

    def put(self, array: torch.Tensor, first: int, piece: torch.Tensor) -> None:
        """Put a piece into an array, from the output `first` on, with which a panel begins."""
        if self.word:
            first //= panels.OUTPUTS
            panels.write(array[first : first + -(-len(piece) // panels.OUTPUTS)], piece)
        else:
            array[first : first + len(piece)].copy_(piece)

    def clear(self, array: torch.Tensor, first: int) -> None:
        """Fill what follows the last output with zeros."""
        array[-(-first // panels.OUTPUTS) if self.word else first :].zero_()


def arrays_of(
    matrix: torch.Tensor | Packed | Unread, layout: Layout, wanted: Sequence[Stored], degree: int, here: range | None
) -> list[list[torch.Tensor]]:
    """Return each of the arrays that are wanted of a matrix, laid out, for the devices that are `here`, by default all.

    An array that is not split comes once. All arrays that are split by outputs must be split alike.
    """
    numbers, inputs, read = _outputs(matrix, layout)
    split = wanted[0].split
    many = max(AT_ONCE // inputs // panels.OUTPUTS, 1) * panels.OUTPUTS
    if split is None or split.axis == 1:
        return _filled(numbers, read, wanted, many, degree, here)
    parts = [part[part > 0] - 1 for part in split.cut(numbers + 1, degree, here)]  # zeros are padding, at the end
    each = [_filled(part, read, wanted, many, degree, here) for part in parts]
    return [[array for [array] in arrays] for arrays in zip(*each, strict=True)]


def _outputs(matrix: torch.Tensor | Packed | Unread, layout: Layout) -> tuple[torch.Tensor, int, _Read]:
    """Return the numbers of outputs in the order of the layout, how many inputs they have, and what reads some."""
    if isinstance(matrix, torch.Tensor):
        whole = layout(matrix)
        return torch.arange(len(whole)), whole.shape[1], functools.partial(_rows, whole)
    sizes = matrix.values.shape if isinstance(matrix, Packed) else matrix.sizes
    return chosen(matrix, layout), sizes[1], matrix.outputs


def _rows(matrix: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return the rows with these numbers, as a view if they follow each other."""
    if (numbers.diff() == 1).all():
        return matrix[int(numbers[0]) :][: len(numbers)]
    return matrix[numbers]


def _filled(
    numbers: torch.Tensor, read: _Read, wanted: Sequence[Stored], many: int, degree: int, here: range | None
) -> list[list[torch.Tensor]]:
    """Return the arrays of these outputs, `many` at a time: one of each kind, or one per device if inputs are split."""
    devices = range(degree) if here is None else here
    by_inputs = [each.split if each.split and each.split.axis == 1 else None for each in wanted]
    found = [
        [torch.empty(each.shape, dtype=each.dtype) for _ in (devices if split else [0])]
        for each, split in zip(wanted, by_inputs, strict=True)
    ]
    for first in range(0, len(numbers), many):
        outputs = read(numbers[first : first + many])
        for each, split, arrays in zip(wanted, by_inputs, found, strict=True):
            stored = each.store(outputs)
            pieces = split.cut(stored, degree, here) if split else [stored]
            for array, piece in zip(arrays, pieces, strict=True):
                each.put(array, first, piece)
    for each, arrays in zip(wanted, found, strict=True):
        for array in arrays:
            each.clear(array, len(numbers))
    return found
