"""Blocks of ggml's types: matrices in few bits, from the bytes of a GGUF file.

A row is a sequence of blocks. A block has its numbers in few bits, and scales: one in f16, or in the K types one in f16
and a whole number for each group. In MXFP4 they are codes and the exponent of their scale. Values and scales are taken
as they are, and no number is rounded: those of `Packed` are bit for bit those of ggml in f32, but for the sign of zero
in MXFP4, which ggml drops.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from transformers_neuronx.config.gguf import STORED
from transformers_neuronx.weights import loops
from transformers_neuronx.weights.bits import WORD, repeated
from transformers_neuronx.weights.coded import of_exponents
from transformers_neuronx.weights.packed import LEAST, Levels, Packed

MXFP4 = "MXFP4"
_Found = tuple[torch.Tensor, Sequence[torch.Tensor]]  # values, and in the K types whole scales and maybe minima, int8


def packed(kind: str, rows: torch.Tensor) -> Packed:
    """Return the matrix that rows of blocks are, u8[out, bytes of a row]. `kind` is one of `STORED`."""
    stored = STORED[kind]
    if kind == MXFP4:  # codes, after the exponent of their scale
        blocks = torch.unflatten(rows, 1, (-1, 1 + stored.group // 2))
        scales = of_exponents("a matrix in MXFP4", blocks[..., 0])
        return Packed(stored.dtype, _fields(blocks[..., 1:], 1, 4).flatten(1), scales, stored.group)
    form = _FORMS[kind]
    blocks = torch.unflatten(rows, 1, (-1, form.size))
    less = -LEAST[stored.dtype] if stored.minima else form.excess
    values, whole = (_by_loops if loops.built() else _by_operations)(kind, blocks, less)
    scales, *minima = (_halves(blocks, at) for at in form.halves)
    if stored.block is None:
        return Packed(stored.dtype, values, scales, stored.group, next(iter(minima), None))
    units = [scales, *(-each for each in minima)]
    levels = tuple(Levels(*each, stored.block) for each in zip(whole, units, strict=True))
    return Packed(stored.dtype, values, None, stored.group, levels=levels)


def _by_loops(kind: str, blocks: torch.Tensor, less: int) -> _Found:
    """Return the numbers of blocks, `less` so many, and whole scales and minima."""
    stored, (outputs, count, _) = STORED[kind], blocks.shape
    size = stored.block or stored.group
    groups = size // stored.group if stored.block else 0
    counts = size, groups, groups if stored.minima else 0
    values, *whole = (torch.empty((outputs, count * each), dtype=torch.int8) for each in counts)
    loops.built().unpacked(kind, less, *map(loops.bytes_of, (blocks.contiguous(), values, *whole)))
    return values, whole[: len(_FORMS[kind].halves)]


def _by_operations(kind: str, blocks: torch.Tensor, less: int) -> _Found:
    form = _FORMS[kind]
    values = (form.numbers(blocks).view(torch.int8) - less).flatten(1)
    return values, [each.view(torch.int8).flatten(1) for each in (form.whole(blocks) if form.whole else ())]


class _Form(NamedTuple):
    """The form of a block: its bytes, where the f16 of its scales and minima are, and what finds its numbers in
    u8[out, blocks, bytes], and whole scales and minima in the K types.

    Numbers count from 0, or from -`excess`.
    """

    size: int
    halves: tuple[int] | tuple[int, int]
    numbers: Callable[[torch.Tensor], torch.Tensor]
    whole: Callable[[torch.Tensor], tuple[torch.Tensor, ...]] | None = None
    excess: int = 0


def _of_q3_k(blocks: torch.Tensor) -> tuple[torch.Tensor]:
    scales = _fields(blocks[..., 96:104], 1, 4) | _fields(blocks[..., 104:108], 1, 2) << 4
    return (scales.view(torch.int8) - 32,)


def _in_six_bits(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales and minima of Q4_K and Q5_K: eight of each in 12 bytes, after the f16 of both.

    Of the first four, all bits are together; of the others, the two highest are above those of the first.
    """
    first, second, third = torch.unflatten(blocks[..., 4:16], -1, (3, 4)).unbind(-2)
    scales = torch.cat([first & 63, third & 15 | first >> 6 << 4], -1)
    return scales, torch.cat([second & 63, third >> 4 | second >> 6 << 4], -1)


def _fields(content: torch.Tensor, runs: int, bits: int) -> torch.Tensor:
    """Return the numbers of so many bits in bytes, lowest bits first: of a run, the first number of each byte, then the
    second of each byte, and so on.
    """
    split = torch.unflatten(content, -1, (runs, -1)).contiguous()  # [..., runs, bytes of a run]
    mask = (1 << bits) - 1
    if split.shape[-1] % WORD == 0:  # four bytes at a time
        split, mask = split.view(torch.int32), repeated(mask)
    found = torch.stack([split >> shift & mask for shift in range(0, 8, bits)], -2)
    return found.flatten(-3).view(torch.uint8)


def _halves(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Return the f16 at a place in each block as f32[out, blocks]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).float().flatten(1)


_FORMS: Mapping[str, _Form] = dict(
    Q4_0=_Form(18, (0,), lambda blocks: _fields(blocks[..., 2:], 1, 4), excess=8),
    Q4_1=_Form(20, (0, 2), lambda blocks: _fields(blocks[..., 4:], 1, 4)),
    Q5_0=_Form(
        22, (0,), lambda blocks: _fields(blocks[..., 6:], 1, 4) | _fields(blocks[..., 2:6], 4, 1) << 4, excess=16
    ),
    Q5_1=_Form(24, (0, 2), lambda blocks: _fields(blocks[..., 8:], 1, 4) | _fields(blocks[..., 4:8], 4, 1) << 4),
    Q8_0=_Form(34, (0,), lambda blocks: blocks[..., 2:]),
    Q2_K=_Form(
        84,
        (80, 82),
        lambda blocks: _fields(blocks[..., 16:80], 2, 2),
        lambda blocks: (blocks[..., :16] & 15, blocks[..., :16] >> 4),
    ),
    Q3_K=_Form(
        110,
        (108,),
        lambda blocks: _fields(blocks[..., 32:96], 2, 2) | _fields(blocks[..., :32], 1, 1) << 2,
        _of_q3_k,
        excess=4,
    ),
    Q4_K=_Form(144, (0, 2), lambda blocks: _fields(blocks[..., 16:], 4, 4), _in_six_bits),
    Q5_K=_Form(
        176,
        (0, 2),
        lambda blocks: _fields(blocks[..., 48:], 4, 4) | _fields(blocks[..., 16:48], 1, 1) << 4,
        _in_six_bits,
    ),
    Q6_K=_Form(
        210,
        (208,),
        lambda blocks: _fields(blocks[..., :128], 2, 4) | _fields(blocks[..., 128:192], 2, 2) << 4,
        lambda blocks: (blocks[..., 192:208],),
        excess=32,
    ),
)
