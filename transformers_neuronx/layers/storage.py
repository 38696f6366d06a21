"""Quantized numbers inside programs, and rows of arrays that stay. `quantization` has the storage of weights."""

from __future__ import annotations

from collections.abc import Sequence

from transformers_neuronx import hlo
from transformers_neuronx.pyhlo import Tensor
from transformers_neuronx.pyhlo.dtypes import INTEGERS
from transformers_neuronx.weights.codes import CODES
from transformers_neuronx.weights.packed import LEAST
from transformers_neuronx.weights.quantization import LARGEST, PACKED, interleaved


def numbers(values: Tensor, scale: Tensor, dtype: str, minimum: Tensor | None = None, codes: str = "") -> Tensor:
    """Dequantize values [..., stored] with a scale [...], or [..., groups] for groups of them. -> [..., in]

    With a minimum [..., groups], that is what a group's smallest value stands for. With `codes`, values are those.
    """
    *lead, size = values.sizes
    scale = hlo.reshape(hlo.convert(scale, "f32"), *lead, -1, 1)
    groups, least = scale.sizes[-2], LEAST["s4" if values.dtype.name == PACKED else "s8"]
    if values.dtype.name == PACKED:
        both = hlo.bitcast_convert(hlo.reshape(values, *lead, -1, interleaved(2 * size // groups) // 2), "s8")
        values = hlo.concatenate([hlo.shift_right(hlo.shift_left(both, 4), 4), hlo.shift_right(both, 4)], -1)
    values = hlo.reshape(values, *lead, groups, -1)
    values = _looked_up(values, CODES[codes]) if codes else hlo.convert(values, "f32")
    if minimum is None:
        return hlo.convert(hlo.reshape(values * scale, *lead, -1), dtype)
    minimum = hlo.reshape(hlo.convert(minimum, "f32"), *lead, -1, 1)
    return hlo.convert(hlo.reshape((values - float(least)) * scale + minimum, *lead, -1), dtype)


def _looked_up(codes: Tensor, table: Sequence[float]) -> Tensor:
    """Return the number of each code: a choice among constants, which XLA fuses with what follows. -> f32[...]"""
    if len(table) == 1:
        return hlo.full(table[0], "f32", codes.sizes)
    half = len(table) // 2
    low, high = (_looked_up(codes, part) for part in (table[:half], table[half:]))
    return hlo.select(hlo.equal(hlo.logical_and(codes, half), 0), low, high)


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
