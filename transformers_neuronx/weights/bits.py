"""Whole numbers of 4, 5 and 6 bits in bytes, in the order in which the CPU's kernels take words of four bytes apart.

A byte of s4 has two numbers. Numbers of 5 and 6 bits, plus half of their range, are in two planes: after some words of
their low four bits, two numbers in a byte as of s4, is a word of their high bits. A byte of it has those of all numbers
whose low bits are at its place in a word, the first number's in its lowest bits.
"""

from __future__ import annotations

import torch

BITS = dict(s4=4, s5=5, s6=6)
DTYPE = "u8"  # of such bytes
WORD = 4  # bytes
ORDER = 2 * WORD  # inputs whose low bits share a word


def interleaved(group: int) -> int:
    """Return the number of s4 inputs in the same bytes: what four bytes hold, if that divides a group."""
    return ORDER if group % ORDER == 0 else group


def together(dtype: str) -> int:
    """Return the inputs that groups are multiples of: with 5 or 6 bits, those that share a word of high bits."""
    return 8 * WORD // (BITS[dtype] - 4) if BITS[dtype] > 4 else 2


def in_bytes(values: torch.Tensor, dtype: str, group: int) -> torch.Tensor:
    """Put numbers of a type into bytes. int8[out, in] -> u8[out, in * bits / 8]"""
    high_bits = BITS[dtype] - 4
    if not high_bits:
        return _pairs(values, interleaved(group))
    values = values + (8 << high_bits)
    low = torch.unflatten(_pairs(values, ORDER), 1, (-1, together(dtype) // 2))
    at = torch.arange(0, 8, high_bits, dtype=torch.uint8).unsqueeze(1)
    high = torch.unflatten(values.view(torch.uint8) >> 4, 1, (-1, 8 // high_bits, WORD)) << at
    return torch.cat([low, high.sum(2, dtype=torch.uint8)], 2).flatten(1)


def _pairs(values: torch.Tensor, size: int) -> torch.Tensor:
    """Put the low four bits of two numbers into each byte: of `size` inputs, the first half in the low bits."""
    low, high = torch.unflatten(values, 1, (-1, 2, size // 2)).unbind(2)
    return ((low & 15) | (high << 4)).view(torch.uint8).flatten(1)
