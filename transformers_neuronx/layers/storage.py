"""Quantized numbers inside programs, and rows of arrays that stay. `quantization` has the storage of weights."""

from __future__ import annotations

from collections.abc import Sequence

from transformers_neuronx import hlo
from transformers_neuronx.pyhlo import Tensor
from transformers_neuronx.pyhlo.dtypes import INTEGERS
from transformers_neuronx.weights import bits
from transformers_neuronx.weights.codes import CODES
from transformers_neuronx.weights.packed import LEAST
from transformers_neuronx.weights.quantization import LARGEST


def numbers(
    values: Tensor,
    scale: Tensor,
    dtype: str,
    minimum: Tensor | None = None,
    scale_unit: Tensor | None = None,
    minimum_unit: Tensor | None = None,
    *,
    inputs: int | None = None,
    codes: str = "",
) -> Tensor:
    """Dequantize values [..., stored] with a scale [...], or [..., groups] for groups of them. -> [..., in]

    Bytes have two values, or as many as give `inputs`. With a minimum [..., groups], that is what a group's smallest
    value stands for. Scales and minima are multiplied by their units [..., blocks] first, if they have any. With
    `codes`, values are those.
    """
    *lead, size = values.sizes
    scale = _of_groups(scale, scale_unit, lead)
    groups, dtype_of_values = scale.sizes[-2], values.dtype.name
    if values.dtype.name == bits.DTYPE:
        inputs = inputs or 2 * size
        dtype_of_values = next(name for name, count in bits.BITS.items() if count * inputs == 8 * size)
        values = _from_bytes(values, dtype_of_values, inputs // groups)
    values = hlo.reshape(values, *lead, groups, -1)
    values = _looked_up(values, CODES[codes]) if codes else hlo.convert(values, "f32")
    if minimum is None:
        return hlo.convert(hlo.reshape(values * scale, *lead, -1), dtype)
    minimum = _of_groups(minimum, minimum_unit, lead)
    least = LEAST.get(dtype_of_values, 0)
    return hlo.convert(hlo.reshape((values - float(least)) * scale + minimum, *lead, -1), dtype)


def _looked_up(codes: Tensor, table: Sequence[float]) -> Tensor:
    """Return the number of each code: a choice among constants, which XLA fuses with what follows. -> f32[...]"""
    if len(table) == 1:
        return hlo.full(table[0], "f32", codes.sizes)
    half = len(table) // 2
    low, high = (_looked_up(codes, part) for part in (table[:half], table[half:]))
    return hlo.select(hlo.equal(hlo.logical_and(codes, half), 0), low, high)


def _from_bytes(values: Tensor, dtype: str, group: int) -> Tensor:
    """Return the numbers that `weights.bits` has put into bytes. -> s8[..., numbers of some bytes]"""
    *lead, _ = values.sizes
    high_bits, size = bits.BITS[dtype] - 4, bits.together(dtype)
    if not high_bits:
        both = hlo.bitcast_convert(hlo.reshape(values, *lead, -1, bits.interleaved(group) // 2), "s8")
        return hlo.concatenate([hlo.shift_right(hlo.shift_left(both, 4), 4), hlo.shift_right(both, 4)], -1)
    values = hlo.reshape(values, *lead, -1, size // 2 + bits.WORD)
    both = hlo.reshape(hlo.slice(values, -1, 0, size // 2), *lead, -1, bits.WORD)
    low = hlo.concatenate([hlo.logical_and(both, 15), hlo.shift_right(both, 4)], -1)
    high = hlo.slice(values, -1, size // 2, size // 2 + bits.WORD)
    parts = [hlo.logical_and(hlo.shift_right(high, at), (1 << high_bits) - 1) for at in range(0, 8, high_bits)]
    high = hlo.reshape(hlo.concatenate(parts, -1), *lead, -1, 2 * bits.WORD)
    numbers = hlo.bitcast_convert(hlo.logical_or(low, hlo.shift_left(high, 4)), "s8")
    return numbers - (8 << high_bits)


def _of_groups(part: Tensor, unit: Tensor | None, lead: Sequence[int]) -> Tensor:
    """Return the scale or minimum of each group. -> f32[..., groups, 1]"""
    part = hlo.convert(part, "f32")
    if unit is not None:
        units = hlo.reshape(hlo.convert(unit, "f32"), *lead, -1, 1)
        part = hlo.reshape(part, *lead, units.sizes[-2], -1) * units
    return hlo.reshape(part, *lead, -1, 1)


def as_matrix(panels: Tensor, outputs: int, inputs: int) -> Tensor:
    """Convert panels [panels, words, outputs of a panel, word] to a matrix [outputs, inputs]."""
    count, words, together, word = panels.sizes
    matrix = hlo.reshape(hlo.transpose(panels, 0, 2, 1, 3), count * together, words * word)
    return hlo.slice(hlo.slice(matrix, 0, 0, outputs), 1, 0, inputs)


def as_rounded(x: Tensor, group: int) -> Tensor:
    """Round x [..., d] to s8, with a scale for every `group` numbers, and dequantize it. -> f32[..., d]"""
    *lead, size = x.sizes
    x = hlo.pad(x, -1, 0, -size % group)
    values, scale = stored(hlo.reshape(x, *lead, -1, group), "s8", scaled=True)
    return hlo.slice(hlo.reshape(numbers(values, scale, "f32"), *lead, -1), -1, 0, size)


def stored(x: Tensor, dtype: str, scaled: bool) -> list[Tensor]:
    """Quantize x [..., d] to `dtype`; if `scaled`, also return a scale f32[..., 1] that makes the largest fit."""
    limit, parts = LARGEST[dtype], []
    x = hlo.convert(x, "f32")
    if scaled:
        parts.append(hlo.max(hlo.abs(x), -1, keep=True) * (1 / limit))
        x = x / hlo.select(parts[0] > 0.0, parts[0], 1.0)
    rounded = hlo.round(x) if dtype in INTEGERS else x
    return [hlo.convert(hlo.clamp(-limit, rounded, limit), dtype), *parts]


def _put_rows_body(x: Tensor, rows: Tensor, at: Tensor) -> Tensor:
    """Write rows [n, ...] to x [·, ...], from row `at`, s32[], on.

    A kernel does it in place. XLA:CPU would convert all of an x in bf16 or f16 to f32 and back.
    """
    zero = hlo.constant(0, "s32")
    return hlo.dynamic_update_slice(x, rows, [at, *(zero for _ in x.sizes[1:])])


put_rows = hlo.composite("put_rows", _put_rows_body)
