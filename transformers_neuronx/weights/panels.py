"""Matrices in panels, the layout that the CPU's kernels read for both few and many rows of activations.

A matrix [out, in] becomes [panels, words, OUTPUTS, word]. A panel holds the first `word` elements of each of OUTPUTS
outputs, then the next `word` elements of each. Zeros pad the last panel and the last word.
"""

from __future__ import annotations

import torch

from transformers_neuronx.weights import loops

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
    laid = torch.empty(sizes((outputs, inputs), word), dtype=dtype or matrix.dtype)
    for first in range(0, len(laid), BLOCK):
        write(laid[first : first + BLOCK], matrix[first * OUTPUTS : (first + BLOCK) * OUTPUTS])
    return laid


def write(laid: torch.Tensor, rows: torch.Tensor) -> None:
    """Write outputs [n, in] into panels that are there. Zeros fill the places of outputs that are missing."""
    count, words, _, word = laid.shape
    missing = [0, words * word - rows.shape[1], 0, count * OUTPUTS - len(rows)]
    rows = rows.to(laid.dtype)
    if (library := loops.built()) and missing[1] == 0 and laid.is_contiguous():
        size = word * laid.itemsize
        library.in_panels(len(rows), words, size, loops.bytes_of(rows.contiguous()), loops.bytes_of(laid))
        return
    rows = rows.view(torch.int8) if rows.dtype is torch.float8_e4m3fn else rows  # which torch cannot pad
    rows = (torch.nn.functional.pad(rows, missing) if any(missing) else rows).contiguous()
    if word > 1:  # a word is moved as one number
        laid, rows = laid.view(torch.int32), rows.view(torch.int32)
    laid.copy_(rows.view(-1, OUTPUTS, words, 1).transpose(1, 2))


def as_matrix(laid: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Convert panels back to a matrix [out, in]."""
    count, words, outputs, word = laid.shape
    return laid.transpose(1, 2).reshape(count * outputs, words * word)[: shape[0], : shape[1]]
