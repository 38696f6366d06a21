"""Matrices of whole numbers that are packed into words of 32 bits, as compressed-tensors, GPTQ and AWQ have them.

A word has eight numbers of 4 bits, or four of 8 bits, the first in the lowest bits. Numbers are unsigned, and one of
them stands for zero: the middle one, or one for each group of inputs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from transformers_neuronx.config.published import Form
from transformers_neuronx.errors import CheckpointError
from transformers_neuronx.weights.packed import LEAST, Packed

AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # where a word has the number of each of eight outputs


def packed(what: str, form: Form, parts: Mapping[str, torch.Tensor]) -> Packed:
    """Return the matrix of these parts: values, scales, and maybe zeros, the group of each input, and sizes.

    CheckpointError, which begins with `what`, if one is missing or they do not fit each other.
    """
    for part in ("values", "scales", *["zeros"] * form.zeros):
        if part not in parts:
            raise CheckpointError(f"{what}: its {part} are missing")
    bits, group = (4 if form.dtype == "s4" else 8), form.block[1]
    values, zeros = _oriented(what, form, parts, bits)
    outputs, inputs = values.shape
    group = group or inputs
    count = -(-inputs // group)
    scales = parts["scales"].float()
    scales = scales if form.packing == "compressed" else scales.T
    if list(scales.shape) != [outputs, count] or (zeros is not None and zeros.shape != scales.shape):
        got = ", ".join(str(list(each.shape)) for each in (values, scales, zeros) if each is not None)
        raise CheckpointError(
            f"{what}: expected scales of groups of {group} inputs, got values, scales and zeros {got}"
        )
    order = _order(what, form, parts.get("groups"), group, inputs)
    values = values if order is None else values[:, order]
    middle = 1 << (bits - 1)
    minima = None
    if form.zeros:
        assert zeros is not None
        minima = scales * (middle + LEAST[form.dtype] - zeros.float())
    elif zeros is not None and not (zeros == middle).all():
        raise CheckpointError(f"{what}: config.json says that {middle} stands for zero, and other numbers do")
    values = (values.int() - middle).to(torch.int8)
    return Packed(form.dtype, values, scales.contiguous(), group, minima, order=order)


def _oriented(
    what: str, form: Form, parts: Mapping[str, torch.Tensor], bits: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return values u8[out, in] and zeros u8[out, groups]."""
    values, zeros = parts["values"], parts.get("zeros")
    for part in [values] if zeros is None else [values, zeros]:
        if part.dtype is not torch.int32 or part.ndim != 2:
            got = f"{str(part.dtype).removeprefix('torch.')}{list(part.shape)}"
            raise CheckpointError(f"{what}: expected words, int32 of two dimensions, got {got}")
    if form.packing == "compressed":
        given = parts.get("sizes", torch.tensor([len(values), values.shape[1] * 32 // bits])).flatten().tolist()
        if len(given) != 2 or given[0] != len(values) or not 0 < given[1] <= values.shape[1] * 32 // bits:
            raise CheckpointError(f"{what}: expected the sizes of a matrix in {list(values.shape)} words, got {given}")
        found = _numbers(values, bits)[:, : given[1]]
        return found, None if zeros is None else _numbers(zeros.T, bits).T[: given[0]]
    if form.packing == "awq":
        return _of_awq(values).T, None if zeros is None else _of_awq(zeros).T
    earlier = 1 if form.packing == "gptq" else 0  # its zeros are one too low
    return _numbers(values.T, bits), None if zeros is None else (_numbers(zeros, bits) + earlier).T


def _order(what: str, form: Form, groups: torch.Tensor | None, group: int, inputs: int) -> torch.Tensor | None:
    """Return the inputs by group, s64[in], if they may have an order of their own."""
    plain = torch.arange(inputs) // group
    given = plain if groups is None else groups.flatten().long()
    if torch.equal(given, plain):
        return torch.arange(inputs) if form.by_group else None
    if not form.by_group:
        raise CheckpointError(
            f"{what}: its inputs are not in the order of their groups (act-order), but config.json says that they are; "
            "set desc_act or actorder there, if that is how it was made"
        )
    if not torch.equal(given.sort().values, plain):
        raise CheckpointError(f"{what}: expected groups of {group} inputs each, got others")
    return given.argsort(stable=True)


def _numbers(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the numbers of words [..., n]. -> u8[..., n * 32 / bits]"""
    found = words.contiguous().view(torch.uint8)
    return found if bits == 8 else torch.stack([found & 15, found >> 4], -1).flatten(-2)


def in_words(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack numbers u8[..., n] into words, filled up with zeros. -> s32[..., n * bits / 32]"""
    numbers = torch.nn.functional.pad(numbers, (0, -numbers.shape[-1] % (32 // bits)))
    if bits == 4:
        low, high = torch.unflatten(numbers, -1, (-1, 2)).unbind(-1)
        numbers = low | (high << 4)
    return numbers.contiguous().view(torch.int32)


def _of_awq(words: torch.Tensor) -> torch.Tensor:
    return torch.unflatten(_numbers(words, 4), -1, (-1, 8))[..., AWQ_PLACES].flatten(-2)
