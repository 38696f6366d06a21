"""Blocks of ggml's types: matrices in few bits, from the bytes of a GGUF file.

A row is a sequence of blocks. A block has its numbers in few bits, and scales: one in f16, or in the K types one in f16
and a whole number for each group. Values and scales are taken as they are, and no number is rounded: those of `Packed`
are bit for bit those of ggml in f32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from transformers_neuronx.config.gguf import STORED
from transformers_neuronx.weights.packed import LEAST, Levels, Packed

# Scales or minima f32[out, blocks, 1]; or whole ones, i8[out, blocks, groups], after such units.
_Scales = tuple[torch.Tensor] | tuple[torch.Tensor, torch.Tensor]
# Numbers of blocks from 0, u8 or i8[out, blocks, numbers]; scales; minima, if any.
_Parts = tuple[torch.Tensor, _Scales, _Scales | None]
# What the numbers of types without minima have in excess.
_EXCESS = dict(Q4_0=8, Q5_0=16, Q8_0=0, Q3_K=4, Q6_K=32)


def packed(kind: str, rows: torch.Tensor) -> Packed:
    """Return the matrix that rows of blocks are, u8[out, bytes of a row]. `kind` is one of `STORED`."""
    stored, (size, unpack) = STORED[kind], _BLOCKS[kind]
    numbers, *scales = unpack(torch.unflatten(rows, 1, (-1, size)))
    flat = [[part.flatten(1) for part in parts] for parts in scales if parts]
    less = -LEAST[stored.dtype] if len(flat) > 1 else _EXCESS[kind]
    values = (numbers.view(torch.int8) - less).flatten(1)
    if stored.block is None:
        return Packed(stored.dtype, values, flat[0][0], stored.group, flat[1][0] if flat[1:] else None)
    levels = tuple(Levels(whole, units, stored.block) for units, whole in flat)
    products = [each.numbers(stored.group) for each in levels]
    return Packed(stored.dtype, values, products[0], stored.group, [*products, None][1], levels=levels)


def _q4_0(blocks: torch.Tensor) -> _Parts:
    return _fields(blocks[..., 2:], 1, 4), (_halves(blocks, 0),), None


def _q4_1(blocks: torch.Tensor) -> _Parts:
    return _fields(blocks[..., 4:], 1, 4), (_halves(blocks, 0),), (_halves(blocks, 2),)


def _q5_0(blocks: torch.Tensor) -> _Parts:
    high = _fields(blocks[..., 2:6], 4, 1)
    return _fields(blocks[..., 6:], 1, 4) | high << 4, (_halves(blocks, 0),), None


def _q5_1(blocks: torch.Tensor) -> _Parts:
    high = _fields(blocks[..., 4:8], 4, 1)
    return _fields(blocks[..., 8:], 1, 4) | high << 4, (_halves(blocks, 0),), (_halves(blocks, 2),)


def _q8_0(blocks: torch.Tensor) -> _Parts:
    return blocks[..., 2:], (_halves(blocks, 0),), None


def _q2_k(blocks: torch.Tensor) -> _Parts:
    scales, minima = blocks[..., :16] & 15, blocks[..., :16] >> 4
    numbers = _fields(blocks[..., 16:80], 2, 2)
    return numbers, (_halves(blocks, 80), scales.view(torch.int8)), (-_halves(blocks, 82), minima.view(torch.int8))


def _q3_k(blocks: torch.Tensor) -> _Parts:
    numbers = _fields(blocks[..., 32:96], 2, 2) | _fields(blocks[..., :32], 1, 1) << 2
    scales = _fields(blocks[..., 96:104], 1, 4) | _fields(blocks[..., 104:108], 1, 2) << 4
    return numbers, (_halves(blocks, 108), scales.view(torch.int8) - 32), None


def _q4_k(blocks: torch.Tensor) -> _Parts:
    return _fields(blocks[..., 16:], 4, 4), *_in_six_bits(blocks)


def _q5_k(blocks: torch.Tensor) -> _Parts:
    high = _fields(blocks[..., 16:48], 1, 1)
    return _fields(blocks[..., 48:], 4, 4) | high << 4, *_in_six_bits(blocks)


def _q6_k(blocks: torch.Tensor) -> _Parts:
    numbers = _fields(blocks[..., :128], 2, 4) | _fields(blocks[..., 128:192], 2, 2) << 4
    return numbers, (_halves(blocks, 208), blocks[..., 192:208].view(torch.int8)), None


def _in_six_bits(blocks: torch.Tensor) -> tuple[_Scales, _Scales]:
    """Return the scales and minima of Q4_K and Q5_K: eight of each in 12 bytes, after the f16 of both.

    Of the first four, all bits are together; of the others, the two highest are above those of the first.
    """
    first, second, third = torch.unflatten(blocks[..., 4:16], -1, (3, 4)).unbind(-2)
    scales = torch.cat([first & 63, third & 15 | first >> 6 << 4], -1)
    minima = torch.cat([second & 63, third >> 4 | second >> 6 << 4], -1)
    return (_halves(blocks, 0), scales.view(torch.int8)), (-_halves(blocks, 2), minima.view(torch.int8))


def _fields(content: torch.Tensor, runs: int, bits: int) -> torch.Tensor:
    """Return the numbers of so many bits in bytes, lowest bits first: of a run, the first number of each byte, then the
    second of each byte, and so on.
    """
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8).unsqueeze(1)
    split = (
        torch.unflatten(content, -1, (runs, -1)).unsqueeze(-2) >> shifts
    )  # [..., runs, numbers in a byte, bytes of a run]
    return (split & (1 << bits) - 1).flatten(-3)


def _halves(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Return the f16 at a place in each block as f32[out, blocks, 1]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).float()


_BLOCKS: Mapping[str, tuple[int, Callable[[torch.Tensor], _Parts]]] = dict(  # bytes of a block, and what unpacks it
    Q4_0=(18, _q4_0),
    Q4_1=(20, _q4_1),
    Q5_0=(22, _q5_0),
    Q5_1=(24, _q5_1),
    Q8_0=(34, _q8_0),
    Q2_K=(84, _q2_k),
    Q3_K=(110, _q3_k),
    Q4_K=(144, _q4_k),
    Q5_K=(176, _q5_k),
    Q6_K=(210, _q6_k),
)
