"""Matrices laid out for products: in panels, as the CPU's kernels read them, few rows of activations or many alike.

A matrix [out, in] becomes [panels, words, OUTPUTS, word]: of OUTPUTS outputs the first `word` elements of each, then
the next ones of each. Zeros fill up the last panel and the last word.
"""

from __future__ import annotations

import torch

OUTPUTS = 16  # of a panel: what the widest vectors hold of 32 bits
WORDS = dict(f32=1, f16=1, bf16=2, s8=4, u8=4)  # elements: 32 bits, but of f16, which are widened one by one


def sizes(matrix: tuple[int, ...], word: int) -> tuple[int, ...]:
    """Those of a matrix in panels."""
    outputs, inputs = matrix
    return -(-outputs // OUTPUTS), -(-inputs // word), OUTPUTS, word


def laid_out(matrix: torch.Tensor, word: int) -> torch.Tensor:
    """A matrix [out, in] in panels."""
    outputs, inputs = matrix.shape
    count, words, *_ = sizes((outputs, inputs), word)
    if (count * OUTPUTS, words * word) != (outputs, inputs):
        padded = matrix.new_zeros(count * OUTPUTS, words * word)
        padded[:outputs, :inputs] = matrix
        matrix = padded
    whole = matrix.contiguous()
    if word > 1:  # a word is moved as one number
        whole = whole.view(torch.int32)
    laid = whole.view(count, OUTPUTS, words).transpose(1, 2).contiguous()
    return laid.view(matrix.dtype).view(count, words, OUTPUTS, word)


def as_matrix(laid: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """What was laid out, [out, in]."""
    count, words, outputs, word = laid.shape
    return laid.transpose(1, 2).reshape(count * outputs, words * word)[: shape[0], : shape[1]]
