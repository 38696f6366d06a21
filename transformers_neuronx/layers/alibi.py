"""ALiBi, attention with linear biases: the slopes by which each head's scores fall with distance."""

from __future__ import annotations

import torch


def alibi_slopes(heads: int) -> torch.Tensor:
    """Return each head's slope: a geometric sequence that ends at 2⁻⁸ (Press et al., arXiv:2108.12409). f32[heads]

    If the number of heads is not a power of two, the slopes for the next lower power come first. Every other slope for
    the next higher power follows, as in the paper's code.
    """
    power = 1 << (heads.bit_length() - 1)
    exponents = [8 * i / power for i in range(1, power + 1)]
    exponents += [4 * i / power for i in range(1, 2 * (heads - power), 2)]
    return torch.exp2(-torch.tensor(exponents))
