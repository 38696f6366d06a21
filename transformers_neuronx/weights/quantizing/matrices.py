"""Matrices in fewer bits: rounded to nearest, or with GPTQ's compensation of errors; and as tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from transformers_neuronx.errors import CheckpointError
from transformers_neuronx.weights.quantizing.rounding import Scales, fitted
from transformers_neuronx.weights.quantizing.schemes import Scheme
from transformers_neuronx.weights.words import in_words

DAMPING = 0.01  # added to the Hessian's diagonal, relative to its mean
COLUMNS = 128  # inputs whose errors are spread over the others at once
# Outputs do not depend on each other. With few of them, the step of an input is too small for torch to divide it among
# threads, which wait for each other longer than the step takes.
OUTPUTS = 256
PARTS = ("values", "scales", "zeros")


@dataclass(frozen=True)
class Quantized:
    """A matrix [out, in] in fewer bits. values f32[out, in]; scales and zeros f32[out, groups], exact in `dtype`."""

    scheme: Scheme
    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    dtype: torch.dtype

    @property
    def numbers(self) -> torch.Tensor:
        """The matrix that it stands for. f32[out, in]"""
        groups = torch.unflatten(self.values, 1, (self.scales.shape[1], -1))
        found: torch.Tensor = (groups - self.zeros[..., None]) * self.scales[..., None]
        return found.flatten(1)

    def tensors(self, module: str, transposed: bool) -> dict[str, torch.Tensor]:
        """Return the tensors that a checkpoint has of a module. Its weight is [in, out] there if it is `transposed`.

        Words are by outputs in any case: that is how such modules are packed.
        """
        scales = {f"{module}.weight_scale": self.scales.to(self.dtype)}
        if not self.scheme.packed:
            weight = self.values.to(torch.float8_e4m3fn)
            return {f"{module}.weight": (weight.T if transposed else weight).contiguous()} | scales
        bits = self.scheme.bits
        unsigned = (self.values + (1 << (bits - 1))).to(torch.uint8)
        shape = torch.tensor(self.values.shape)
        found = {f"{module}.weight_packed": in_words(unsigned, bits), f"{module}.weight_shape": shape} | scales
        if self.scheme.zeros:
            zeros = (self.zeros + (1 << (bits - 1))).to(torch.uint8)
            found[f"{module}.weight_zero_point"] = in_words(zeros.T, bits).T.contiguous()
        return found


def rounded(scheme: Scheme, matrix: torch.Tensor, dtype: torch.dtype) -> Quantized:
    """Round a matrix f32[out, in] to nearest."""
    parts = torch.split(matrix, scheme.group or matrix.shape[1], 1)
    found = [fitted(scheme, part, dtype) for part in parts]
    return _joined(scheme, [each.values(part) for each, part in zip(found, parts, strict=True)], found, dtype)


def compensated(
    scheme: Scheme, matrix: torch.Tensor, hessian: torch.Tensor, dtype: torch.dtype, what: str
) -> Quantized:
    """Round a matrix f32[out, in] so that its products with inputs like those of `hessian` change least (GPTQ).

    `hessian` is the sum of x xᵀ over inputs x, f32[in, in]. Inputs are rounded one after the other; what the error of
    one changes in the products, later ones make up for, as the inverse of the Hessian says. Scales of a group are
    fitted when it is its turn. Raises CheckpointError, which begins with `what`, for inputs that are not finite.
    """
    inverse = _inverse(hessian, what)
    parts = [_compensated(scheme, outputs.clone(), inverse, dtype) for outputs in torch.split(matrix, OUTPUTS)]
    values, scales, zeros = (torch.cat([getattr(each, name) for each in parts]) for name in PARTS)
    return Quantized(scheme, values, scales, zeros, dtype)


def _compensated(scheme: Scheme, matrix: torch.Tensor, inverse: torch.Tensor, dtype: torch.dtype) -> Quantized:
    """Quantize a matrix, which is overwritten. `inverse` is the Cholesky factor of the inverse of the Hessian."""
    group = scheme.group or matrix.shape[1]
    values, found = [], []
    for first, last in _blocks(matrix.shape[1], group):
        if first % group == 0:
            found.append(fitted(scheme, matrix[:, first : first + group], dtype))
        block, own = matrix[:, first:last].T.contiguous(), inverse[first:last, first:last]  # rows are fast to update
        errors = torch.empty_like(block)
        for column, numbers in enumerate(block):
            values.append(found[-1].values(numbers[:, None]))
            errors[column] = (numbers - found[-1].numbers(values[-1])[:, 0]) / own[column, column]
            block[column + 1 :].addr_(own[column, column + 1 :], errors[column], alpha=-1)
        matrix[:, last:] -= errors.T @ inverse[first:last, last:]
    return _joined(scheme, values, found, dtype)


def _blocks(inputs: int, group: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of inputs of which none has the end of a group inside."""
    for start in range(0, inputs, group):
        end = min(start + group, inputs)
        yield from ((first, min(first + COLUMNS, end)) for first in range(start, end, COLUMNS))


def _inverse(hessian: torch.Tensor, what: str) -> torch.Tensor:
    """Return the upper Cholesky factor of the inverse of a damped Hessian."""
    mean = float(hessian.diagonal().mean())
    if not torch.isfinite(hessian).all():
        raise CheckpointError(f"{what}: its inputs are not all finite in f32; leave the calibration out")
    for more in (1, 10, 100):
        damped = hessian.clone()
        # an input that is always zero says nothing: its numbers are rounded to nearest
        damped.diagonal().add_(more * DAMPING * mean if mean else 1.0)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper: torch.Tensor
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed:
                return upper
    raise CheckpointError(f"{what}: too few tokens for the calibration of its inputs; take a longer text")


def _joined(scheme: Scheme, values: list[torch.Tensor], found: list[Scales], dtype: torch.dtype) -> Quantized:
    scales, zeros = (torch.cat([getattr(each, name) for each in found], 1) for name in ("scales", "zeros"))
    return Quantized(scheme, torch.cat(values, 1), scales, zeros, dtype)
