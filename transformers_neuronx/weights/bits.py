"""Whole numbers of 4, 5 and 6 bits in bytes, in the order in which the CPU's kernels take words of four bytes apart.

A byte of s4 has two numbers. Numbers of 5 and 6 bits, plus half of their range, are in two planes: after some words of
their low four bits, two numbers in a byte as of s4, is a word of their high bits. A byte of it has those of all numbers
whose low bits are at its place in a word, the first number's in its lowest bits.
"""

from __future__ import annotations

import functools

import torch

from transformers_neuronx.weights import loops

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


def repeated(byte: int) -> int:
    """Return the word of 32 bits, as torch has it, whose four bytes are alike."""
    return int.from_bytes(bytes([byte] * WORD), "little", signed=True)


def in_bytes(values: torch.Tensor, dtype: str, group: int) -> torch.Tensor:
    """Put numbers of a type into bytes. int8[out, in] -> u8[out, in * bits / 8]"""
    high_bits = BITS[dtype] - 4
    if (library := loops.built()) and (high_bits or interleaved(group) == ORDER):
        made = torch.empty((len(values), values.shape[1] // 8 * BITS[dtype]), dtype=torch.uint8)
        library.packed(BITS[dtype], loops.bytes_of(values.contiguous()), loops.bytes_of(made))
        return made
    if not high_bits:
        return _pairs(values, interleaved(group))
    values = values.contiguous() + (8 << high_bits)
    low = torch.unflatten(_pairs(values, ORDER).view(torch.int32), 1, (-1, together(dtype) // ORDER))
    high = values.view(torch.int32) >> 4 & repeated((1 << high_bits) - 1)  # of four numbers in each word
    of_a_word = torch.unflatten(high, 1, (-1, 8 // high_bits)).unbind(2)
    high = functools.reduce(torch.bitwise_or, (each << at * high_bits for at, each in enumerate(of_a_word)))
    return torch.cat([low, high.unsqueeze(2)], 2).flatten(1).view(torch.uint8)


def _pairs(values: torch.Tensor, size: int) -> torch.Tensor:
    """Put the low four bits of two numbers into each byte: of `size` inputs, the first half in the low bits."""
    kind, low_bits = (torch.int32, repeated(15)) if size % ORDER == 0 else (torch.int8, 15)  # words are faster
    halves = torch.unflatten(values.contiguous().view(kind), 1, (-1, 2, size // 2 // kind.itemsize))
    low, high = (halves & low_bits).unbind(2)
    return (low | high << 4).flatten(1).view(torch.uint8)
