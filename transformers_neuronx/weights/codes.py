"""Codes of four bits: the sixteen numbers that they stand for."""

from __future__ import annotations

from collections.abc import Mapping

import torch

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP4 = tuple(number / 12 for number in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0))
CODES: Mapping[str, tuple[float, ...]] = {
    "e2m1": (*_E2M1, *(-number for number in _E2M1)),  # of MXFP4 and NVFP4
    "nf4": (  # of bitsandbytes: quantiles of a normal distribution
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
        0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
    "fp4": (*_FP4, *(-number for number in _FP4)),  # of bitsandbytes
}  # fmt: skip


def numbers(codes: torch.Tensor, dtype: str) -> torch.Tensor:
    """Return the numbers of codes in 0 to 15. f32[...]"""
    return torch.tensor(CODES[dtype])[codes.long()]


def nearest(matrix: torch.Tensor, dtype: str) -> torch.Tensor:
    """Return the codes of the nearest numbers. int8[...]"""
    ordered, order = torch.tensor(CODES[dtype]).sort(stable=True)
    return order[torch.bucketize(matrix, (ordered[1:] + ordered[:-1]) / 2)].to(torch.int8)


def unpacked(pairs: torch.Tensor, low_first: bool = True) -> torch.Tensor:
    """Return the codes of bytes [..., n] with two each. -> u8[..., 2 n]"""
    low, high = pairs & 15, pairs >> 4
    return torch.stack([low, high] if low_first else [high, low], -1).flatten(-2)
