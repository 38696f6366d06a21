"""Attention with linear biases: the slopes by which the scores of each head fall with distance."""

from __future__ import annotations

import torch


def alibi_slopes(heads: int) -> torch.Tensor:
    """A geometric sequence that ends at 2⁻⁸ (Press et al., arXiv:2108.12409). f32[heads]

    For a number of heads that is no power of two, the one for the power below it, and then every other slope of the
    one for the power above, as in the paper's own code.
    """
    power = 1 << (heads.bit_length() - 1)
    exponents = [8 * i / power for i in range(1, power + 1)]
    exponents += [4 * i / power for i in range(1, 2 * (heads - power), 2)]
    return torch.exp2(-torch.tensor(exponents))
