"""Matrices of codes of four bits, two in a byte: MXFP4 and NVFP4 of compressed-tensors, nf4 and fp4 of bitsandbytes.

And the experts of gpt-oss in MXFP4, whose groups of codes are an axis of their own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from transformers_neuronx.config.published import Form
from transformers_neuronx.errors import CheckpointError
from transformers_neuronx.weights.codes import CODES, unpacked
from transformers_neuronx.weights.packed import Packed, Unread

_OF_SCALES = {"mxfp4": torch.uint8, "nvfp4": torch.float8_e4m3fn}
NAN, SMALLEST = 255, 1 << 22  # the exponent that stands for NaN; the bits of 2^-127, which is subnormal


def packed(what: str, form: Form, parts: Mapping[str, torch.Tensor]) -> Packed:
    """Return the matrix of these parts. CheckpointError, which begins with `what`, if they do not fit each other."""
    return (_of_blocks if form.packing == "bitsandbytes" else _of_groups)(what, form, parts)


def expert(what: str, form: Form, parts: Mapping[str, torch.Tensor], number: int) -> Unread:
    """Return the matrix of an expert of gpt-oss, which is [in, out] otherwise.

    Parts are those of all experts: values u8[experts, out, groups, ·], and scales, exponents u8[experts, out, groups].
    CheckpointError, which begins with `what`, if they do not fit each other.
    """
    values, scales = (_part(what, parts, name) for name in ("values", "scales"))
    size = form.block[1] or 1
    _want(what, "values", values, torch.uint8, (None, None, None, size // 2))
    _want(what, "scales", scales, torch.uint8, tuple(values.shape[:3]))
    own, exponents = values[number], scales[number]
    outputs, groups = exponents.shape

    def read(numbers: torch.Tensor) -> Packed:
        codes = unpacked(own[numbers].flatten(1))
        return Packed(form.dtype, codes, of_exponents(what, exponents[numbers]), size)

    return Unread((outputs, groups * size), read, transposed=True)


def of_exponents(what: str, exponents: torch.Tensor) -> torch.Tensor:
    """Return powers of two, which bytes have as exponents (E8M0). -> f32[...]"""
    if (exponents == NAN).any():
        raise CheckpointError(f"{what}: expected exponents as scales, found NaN")
    bits = torch.where(exponents == 0, SMALLEST, exponents.int() << 23)  # a float has the exponent in the same bias
    return bits.view(torch.float32)


def _of_groups(what: str, form: Form, parts: Mapping[str, torch.Tensor]) -> Packed:
    """Two inputs in a byte, the first in the low bits; a scale for each group, and for NVFP4 one that divides them."""
    values, scales = (_part(what, parts, name) for name in ("values", "scales"))
    _want(what, "values", values, torch.uint8, (None, None))
    group, inputs = form.block[1] or 1, 2 * values.shape[1]
    if inputs % group:
        raise CheckpointError(f"{what}: expected inputs in groups of {group}, got {inputs}")
    _want(what, "scales", scales, _OF_SCALES[form.packing], (len(values), inputs // group))
    if form.packing == "mxfp4":
        scales = of_exponents(what, scales)
    else:
        divisor = _part(what, parts, "divisor")
        if divisor.dtype is not torch.float32 or divisor.numel() != 1:
            raise CheckpointError(f"{what}: expected one f32 that divides all scales, got {_said(divisor)}")
        scales = _finite(what, scales.float() / divisor.reshape(()))
    return Packed(form.dtype, unpacked(values), scales, group)


def _of_blocks(what: str, form: Form, parts: Mapping[str, torch.Tensor]) -> Packed:
    """Two numbers in a byte, the first in the high bits; a scale for each block of numbers in the order of memory."""
    if f"state of {form.dtype}" not in parts:
        raise CheckpointError(f"{what}: expected a quant_state of {form.dtype}, as config.json says")
    state = _state_of(what, form, parts[f"state of {form.dtype}"])
    (outputs, inputs), size = state["shape"], state["blocksize"]
    values, table = (_part(what, parts, name) for name in ("values", "table"))
    if values.dtype is not torch.uint8 or 2 * values.numel() != outputs * inputs:
        raise CheckpointError(f"{what}: expected bytes with {outputs} × {inputs} numbers, got {_said(values)}")
    _want(what, "quant_map", table, torch.float32, (16,))
    if not torch.allclose(table, torch.tensor(CODES[form.dtype]), rtol=0, atol=1e-6):
        raise CheckpointError(f"{what}: its codes stand for other numbers than those of {form.dtype}")
    if inputs % size or size % (form.block[1] or 1):
        raise CheckpointError(
            f"{what}: expected inputs in blocks of {form.block[1]}, or of a multiple, got {inputs} in blocks of {size}"
        )
    scales = _absmax(what, parts, state, outputs * inputs // size)
    codes = unpacked(values.flatten(), low_first=False).view(outputs, inputs)
    return Packed(form.dtype, codes, scales.view(outputs, -1), size)


def _absmax(what: str, parts: Mapping[str, torch.Tensor], state: Mapping[str, Any], count: int) -> torch.Tensor:
    """Return the scales of blocks. They may be codes of 8 bits, in larger blocks that have scales, plus an offset."""
    scales = _part(what, parts, "scales")
    if "nested scales" not in parts:
        _want(what, "absmax", scales, torch.float32, (count,))
        return _finite(what, scales)
    size = state.get("nested_blocksize", 0)
    if not size:
        raise CheckpointError(f"{what}: expected the nested_blocksize of its scales in its quant_state")
    nested, table = (_part(what, parts, name) for name in ("nested scales", "nested table"))
    _want(what, "absmax", scales, torch.uint8, (count,))
    _want(what, "nested_quant_map", table, torch.float32, (256,))
    _want(what, "nested_absmax", nested, torch.float32, (-(-count // size),))
    each = nested.repeat_interleave(min(size, count))[:count]
    return _finite(what, table[scales.long()] * each + torch.tensor(state["nested_offset"], dtype=torch.float32))


def _state_of(what: str, form: Form, part: torch.Tensor) -> dict[str, Any]:
    """Read the JSON that a tensor of bytes has."""
    try:
        state = json.loads(bytes(part.flatten().tolist()))
        sizes = [state["blocksize"], *state["shape"], state.get("nested_blocksize", 1)]
        known = state["quant_type"] == form.dtype and len(state["shape"]) == 2
        known = known and all(type(size) is int and 0 < size < 2**40 for size in sizes)
        state["nested_offset"] = float(state.get("nested_offset", 0))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        known = False
    if not known:
        raise CheckpointError(f"{what}: expected a quant_state of {form.dtype} with sizes of a matrix and of blocks")
    return dict(state)


def _part(what: str, parts: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    if name not in parts:
        raise CheckpointError(f"{what}: its {name} are missing")
    return parts[name]


def _want(what: str, name: str, part: torch.Tensor, dtype: torch.dtype, sizes: tuple[int | None, ...]) -> None:
    fits = len(sizes) == part.ndim and all(w in (None, g) for w, g in zip(sizes, part.shape, strict=True))
    if part.dtype is not dtype or not fits:
        wanted = (
            f"{str(dtype).removeprefix('torch.')}[{', '.join('?' if size is None else str(size) for size in sizes)}]"
        )
        raise CheckpointError(f"{what}: expected {name} {wanted}, got {_said(part)}")


def _said(part: torch.Tensor) -> str:
    return f"{str(part.dtype).removeprefix('torch.')}{list(part.shape)}"


def _finite(what: str, scales: torch.Tensor) -> torch.Tensor:
    if not scales.isfinite().all():
        raise CheckpointError(f"{what}: its scales are not finite")
    return scales
