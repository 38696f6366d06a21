"""Matrices in panels, the layout that the CPU's kernels read for both few and many rows of activations.

A matrix [out, in] becomes [panels, words, OUTPUTS, word]. A panel holds the first `word` elements of each of OUTPUTS
outputs, then the next `word` elements of each. Zeros pad the last panel and the last word.
"""

from __future__ import annotations

import torch

OUTPUTS = 16  # outputs of a panel: the 32-bit elements of the widest vectors
BLOCK = 16  # panels laid out at once
# Elements of a word: 32 bits, except f16, which is widened one by one.
WORDS = dict(f32=1, f16=1, bf16=2, s8=4, u8=4, f8e4m3fn=4)


def sizes(matrix: tuple[int, ...], word: int) -> tuple[int, ...]:
    """Return the sizes of a matrix in panels."""
    outputs, inputs = matrix
    return -(-outputs // OUTPUTS), -(-inputs // word), OUTPUTS, word


def laid_out(matrix: torch.Tensor, word: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Convert a matrix [out, in] to panels, optionally of another `dtype`. Only BLOCK panels are in memory twice."""
    outputs, inputs = matrix.shape
    count, words, *_ = shape = sizes((outputs, inputs), word)
    laid = torch.empty(shape, dtype=dtype or matrix.dtype)
    for first in range(0, count, BLOCK):
        block = laid[first : first + BLOCK]
        rows = matrix[first * OUTPUTS : (first + BLOCK) * OUTPUTS].to(laid.dtype)
        missing = len(block) * OUTPUTS - len(rows)
        rows = rows.view(torch.int8) if rows.dtype is torch.float8_e4m3fn else rows  # which torch cannot pad
        rows = torch.nn.functional.pad(rows, (0, words * word - inputs, 0, missing)).contiguous()
        if word > 1:  # a word is moved as one number
            block, rows = block.view(torch.int32), rows.view(torch.int32)
        block.copy_(rows.view(-1, OUTPUTS, words, 1).transpose(1, 2))
    return laid


def as_matrix(laid: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Convert panels back to a matrix [out, in]."""
    count, words, outputs, word = laid.shape
    return laid.transpose(1, 2).reshape(count * outputs, words * word)[: shape[0], : shape[1]]
