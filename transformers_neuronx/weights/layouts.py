"""Layouts: what makes a tensor of a checkpoint into one of the graph."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

Layout = Callable[[torch.Tensor], torch.Tensor]


def as_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    """Transpose a `Conv1D`'s [in, out] to a `Linear`'s [out, in]; a bias is unchanged."""
    return tensor.movedim(-1, 0)


def plus_one(tensor: torch.Tensor) -> torch.Tensor:
    """Add one to the weight of a norm that multiplies by one plus its weight."""
    return tensor.float() + 1


def inputs_flattened(tensor: torch.Tensor) -> torch.Tensor:
    """Make the weights of a convolution whose steps do not overlap, [out, ...], those of a linear layer, [out, in]."""
    return tensor.flatten(1)


def flattened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten()


@functools.cache
def part(index: int, parts: int, layout: Layout = as_is) -> Layout:
    """Layout: piece `index` of `parts` equal ones along the outputs of a fused layer, after `layout`."""
    return lambda tensor: layout(tensor).chunk(parts)[index]


@functools.cache
def in_turns(index: int, parts: int, layout: Layout = as_is) -> Layout:
    """Layout: every one of `parts` outputs of a fused layer from output `index` on, after `layout`."""
    return lambda tensor: layout(tensor)[index::parts]


def part_per_head(index: int, parts: int, head_dim: int) -> Layout:
    """Layout: piece `index` of `parts` equal ones of a fused layer whose outputs are [heads, parts, d]."""
    return section_per_head(index, (head_dim,) * parts)


@functools.cache
def section_per_head(index: int, sizes: tuple[int, ...]) -> Layout:
    """Layout: piece `index` of pieces of `sizes` of each head, of a fused layer with outputs [heads, all pieces]."""
    return lambda tensor: torch.unflatten(tensor, 0, (-1, sum(sizes))).split_with_sizes(sizes, 1)[index].flatten(0, 1)


@functools.cache
def taps(layout: Layout) -> Layout:
    """Layout: make the weights of a convolution of single features [c, 1, size], after `layout`, f32[size, c]."""
    return lambda tensor: layout(tensor).squeeze(1).movedim(0, -1).float()


@functools.cache
def pairs_as_halves(head_dim: int, rotary_dim: int, layout: Layout = as_is, first: int = 0) -> Layout:
    """Layout: reorder features that rotate in pairs (0 with 1), to rotate 0 with rotary_dim / 2 and so on in each head.

    The product of a query and a key does not change if the features of both are reordered alike. `layout` comes first.
    The features that rotate begin with the `first` one of a head.
    """
    turned = range(first, first + rotary_dim)
    order = [*range(first), *turned[::2], *turned[1::2], *range(first + rotary_dim, head_dim)]
    numbers = torch.tensor(order)  # a list as an index of a tensor without numbers would import SymPy
    return lambda tensor: torch.unflatten(layout(tensor), 0, (-1, head_dim)).index_select(1, numbers).flatten(0, 1)


@functools.cache
def turns_as_heads(turns: int, size: int, first: int = 0) -> Layout:
    """Layout: reorder heads of `size` elements from [turns, heads] to [heads, turns], after the `first` elements."""
    return lambda tensor: torch.cat(
        [tensor[:first], torch.unflatten(tensor[first:], 0, (turns, -1, size)).swapaxes(0, 1).flatten(0, 2)]
    )


@functools.cache
def for_each_head(layout: Layout) -> Layout:
    """Layout: make weights [heads, d] of a norm into [heads d], and then apply `layout`."""
    return lambda tensor: layout(tensor.flatten())


@functools.cache
def section(index: int, sizes: tuple[int, ...], layout: Layout = as_is) -> Layout:
    """Layout: piece `index` of pieces of `sizes` along the outputs of a fused layer, after `layout`."""
    return lambda tensor: layout(tensor).split_with_sizes(sizes)[index]


@functools.cache
def part_if_fused(index: int, outputs: int) -> Layout:
    """Layout: a layer with so many outputs, unchanged; of a fused one, piece `index` with as many."""
    return lambda tensor: tensor if len(tensor) == outputs else torch.split(tensor, outputs)[index]
