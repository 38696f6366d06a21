"""Quantized weights: which rows of a weight table are quantized, and what is stored.

A matrix [out, in] is `scale * values`. Values are small integers or floats, with one scale for each output, or for
each `group` of an output's inputs. `layers.linear` multiplies by it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import torch

from transformers_neuronx.config.switches import QuantizationConfig
from transformers_neuronx.errors import ConfigError
from transformers_neuronx.pyhlo.dtypes import to_torch
from transformers_neuronx.weights import bits, panels
from transformers_neuronx.weights.codes import CODES, nearest
from transformers_neuronx.weights.packed import LEAST, Levels, Packed, Store
from transformers_neuronx.weights.rows import MINIMUM, ORDER, SCALE, UNIT, Weight, matrix_of
from transformers_neuronx.weights.splits import HeadSplit, Split

# The value that the largest number of a group becomes. For s4 it is -8, as there is no +8. The scale then has the
# opposite sign of the number.
LARGEST = {"s8": 127.0, "s6": -32.0, "s5": -16.0, "s4": -8.0, "f8e4m3fn": 448.0}
LARGEST |= {name: max(numbers) for name, numbers in CODES.items()}
STEPS = {"s8": 127, "s6": 63, "s5": 31, "s4": 15}  # from the smallest value of a group with a minimum to the largest
ROUNDED = 32  # 8-bit activations that share a scale, if weights have no groups
BLOCK = 2**18  # numbers rounded at once, so that intermediates stay in a core's cache
# How a matrix is stored, as `config.gguf.storage` writes it.
STORED = re.compile(
    r"(?P<dtype>s8|s6|s5|s4|f8e4m3fn|e2m1|nf4|fp4)(?:/(?P<group>[1-9]\d{0,8}))?, "
    r"(?:s8 x (?P<unit>f32|f16|bf16)/(?P<block>[1-9]\d{0,8})|(?P<type>f32|f16|bf16))(?P<minima> with minima)?"
    r"(?P<by_group>, by group)?"
)
PLAIN = "plain"  # the storage of a matrix in the type of activations


@dataclass(frozen=True)
class Storage:
    """How a matrix is stored: its element type, the inputs that share a scale (None: all), whether it has scales.

    `scale_type` is the type of scales, and of the minima of groups if it is `with_minima`. By default it is bf16 for
    s4, else f32. With a `block`, both are in two levels: a group has a whole number, s8, and the groups of so many
    inputs share a unit of `scale_type`. With `by_group`, inputs stand by group, in an order of the matrix's own.
    """

    dtype: str
    group: int | None = None
    scaled: bool = True
    scale_type: str = ""
    with_minima: bool = False
    block: int | None = None
    by_group: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale_type", self.scale_type or ("bf16" if self.dtype == "s4" else "f32"))

    @property
    def packed(self) -> bool:
        """Whether numbers share bytes."""
        return self.dtype in bits.BITS or self.dtype in CODES

    @staticmethod
    def of(text: str) -> Storage | None:
        """Read a storage as `config.gguf.storage` writes it; None for `PLAIN`. Raises ConfigError for anything else."""
        if text == PLAIN:
            return None
        match = STORED.fullmatch(text)
        group, block = (int(match[name]) if match and match[name] else None for name in ("group", "block"))
        minima, by_group = (bool(match and match[name]) for name in ("minima", "by_group"))
        dtype = match["dtype"] if match else ""
        of_whole = bool(minima or block or by_group)  # numbers
        needs_group = of_whole or dtype in bits.BITS or dtype in CODES
        together = bits.together(dtype) if dtype in bits.BITS else 2
        in_groups = group is not None and group % together == 0 and (block or group) % group == 0
        if match is None or (needs_group and not in_groups) or (of_whole and dtype not in LEAST):
            raise ConfigError(
                f"a matrix must be stored as {PLAIN!r}, or as in 's4/32, f16 with minima' or 's8/16, s8 x f16/256', "
                f"got {text!r}"
            )
        return Storage(dtype, group, True, match["type"] or match["unit"], minima, block, by_group)

    def scales(self, matrix: torch.Tensor | Packed) -> torch.Tensor:
        """Return the scale of each output or of its groups. f32[out], or [out, groups]; as precise as `scale_type`.

        Of two levels, the whole numbers, s8.
        """
        return self._of_groups(matrix, 0)

    def minima(self, matrix: torch.Tensor | Packed) -> torch.Tensor:
        """Return what the smallest value of each group stands for, as scales are returned."""
        return self._of_groups(matrix, 1)

    def scale_units(self, matrix: torch.Tensor | Packed) -> torch.Tensor:
        """Return the units of scales in two levels. f32[out, blocks]"""
        return self._of_groups(matrix, 0, units=True)

    def minimum_units(self, matrix: torch.Tensor | Packed) -> torch.Tensor:
        """Return the units of minima in two levels. f32[out, blocks]"""
        return self._of_groups(matrix, 1, units=True)

    def order(self, matrix: torch.Tensor | Packed) -> torch.Tensor:
        """Return one more than the number of each input, by group. s32[whole groups of in]; zero is padding."""
        own = matrix.order if isinstance(matrix, Packed) and self._keeps(matrix) else None
        inputs = matrix.values.shape[1] if isinstance(matrix, Packed) else matrix.shape[1]
        order = (torch.arange(inputs) if own is None else own).int() + 1
        return torch.nn.functional.pad(order, (0, -inputs % (self.group or 1)))

    def values(self, matrix: torch.Tensor | Packed) -> torch.Tensor:
        """Return the array that is stored: s8 or f8e4m3fn [out, whole groups of in], or fewer bits in bytes, u8."""
        if isinstance(matrix, Packed):
            if not self._keeps(matrix):
                return self.values(matrix.numbers)
            missing = -matrix.values.shape[1] % (self.group or 1)
            values = matrix.values.view(torch.int8)  # torch cannot pad FP8
            values = torch.nn.functional.pad(values, (0, missing)) if missing else values
            if self.with_minima and matrix.dtype != self.dtype:
                values = values + (LEAST[self.dtype] - LEAST[matrix.dtype])
            return self._in_bytes(values) if self.packed else values.view(matrix.values.dtype)
        return torch.cat([self._values(outputs) for outputs in _in_blocks(matrix)])

    def _of_groups(self, matrix: torch.Tensor | Packed, which: int, units: bool = False) -> torch.Tensor:
        """Return scales or minima, or with `units` those of both."""
        if not isinstance(matrix, Packed):
            if self.block is None:
                return torch.cat([self._scales(outputs)[which] for outputs in _in_blocks(matrix)])
            levels = [self._levels(self._exact(outputs)[which]) for outputs in _in_blocks(matrix)]
            return torch.cat([each.units if units else each.whole for each in levels])
        if not self._keeps(matrix):
            return self._of_groups(matrix.numbers, which, units)
        if self.block is None:
            kept = matrix.in_groups(self.group, matrix.minima if which else matrix.scales)
        else:
            whole, unit, block = matrix.levels[which]
            kept = matrix.in_groups(self.block, unit, block) if units else matrix.in_groups(self.group, whole)
        assert kept is not None
        return kept

    def _keeps(self, matrix: Packed) -> bool:
        """Whether a matrix is stored in this way already. Whole numbers of fewer bits are stored as s8, too."""
        holds = matrix.dtype == self.dtype or (self.dtype == "s8" and matrix.dtype in bits.BITS)
        alike = self.scaled and holds and matrix.with_minima == self.with_minima
        alike = alike and (matrix.order is None or self.by_group)
        if self.block is None:
            return alike and matrix.in_groups(self.group, matrix.scales) is not None
        parts = [(self.group, each.whole, matrix.group) for each in matrix.levels]
        parts += [(self.block, each.units, each.block) for each in matrix.levels]
        return alike and bool(parts) and all(matrix.in_groups(*each) is not None for each in parts)

    def _scales(self, matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scales and minima as they are kept; without any, minima are zeros."""
        scales, minima = self._exact(matrix)
        return (scales, minima) if self.group is None else (self._as_kept(scales), self._as_kept(minima))

    def _exact(self, matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return them before they are rounded."""
        if self.group is None:
            scales = matrix.float().abs().amax(1) / LARGEST[self.dtype]
            return scales, torch.zeros_like(scales)
        least, most = torch.aminmax(self._groups(matrix), dim=2)
        if self.with_minima:
            return (most - least) / STEPS[self.dtype], least
        if self.dtype in bits.BITS:
            scales = torch.where(most > -least, most, least) / LARGEST[self.dtype]
        else:
            scales = torch.maximum(most, -least) / LARGEST[self.dtype]
        return scales, torch.zeros_like(scales)

    def _as_kept(self, scales: torch.Tensor) -> torch.Tensor:
        if self.block is not None and self.group is not None:
            return self._levels(scales).numbers(self.group)
        return scales.to(to_torch(self.scale_type)).float()

    def _levels(self, scales: torch.Tensor) -> Levels:
        assert self.group is not None and self.block is not None
        return Levels.of(scales, self.group, self.block, to_torch(self.scale_type))

    def _values(self, matrix: torch.Tensor) -> torch.Tensor:
        scales, minima = self._scales(matrix)
        if self.group is None:
            return self._rounded(matrix.float(), scales[:, None] if self.scaled else torch.ones(()))
        numbers = self._groups(matrix)
        if self.with_minima:
            values = self._rounded(numbers - minima[..., None], scales[..., None], LEAST[self.dtype])
        else:
            values = self._rounded(numbers, scales[..., None])
        return self._in_bytes(values.flatten(1)) if self.packed else values.flatten(1)

    def _in_bytes(self, values: torch.Tensor) -> torch.Tensor:
        assert self.group is not None
        return bits.in_bytes(values, "s4" if self.dtype in CODES else self.dtype, self.group)

    def _groups(self, matrix: torch.Tensor) -> torch.Tensor:
        """Reshape to f32[out, groups, group], with zeros at the end of the last group."""
        assert self.group is not None
        padded = torch.nn.functional.pad(matrix.float(), (0, -matrix.shape[1] % self.group))
        return torch.unflatten(padded, 1, (-1, self.group))

    def _rounded(self, matrix: torch.Tensor, scale: torch.Tensor, least: int = 0) -> torch.Tensor:
        """Divide by the scale, round, and add `least`. Where the scale is zero, so are all numbers, and stay zero."""
        scaled, limit = matrix / torch.where(scale == 0, 1, scale), abs(LARGEST[self.dtype])
        if self.dtype in CODES:
            return nearest(scaled, self.dtype)
        if self.dtype == "f8e4m3fn":
            return scaled.clamp_(-limit, limit).to(torch.float8_e4m3fn)
        scaled = scaled.round_().add_(least)
        return scaled.clamp_(-limit, limit - 1 if self.dtype in bits.BITS else limit).to(torch.int8)


@dataclass(frozen=True)
class _Part:
    """What is stored of a matrix: its values, scales, minima or order. Rows of the table with equal ones share a
    tensor.

    Methods of equal storages are not equal.
    """

    storage: Storage
    name: str

    def __call__(self, matrix: torch.Tensor | Packed) -> torch.Tensor:
        found: torch.Tensor = getattr(self.storage, self.name)(matrix)
        return found


def _in_blocks(matrix: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Split a matrix into blocks of outputs, since the intermediates of quantization are many times as large."""
    return torch.split(matrix, max(BLOCK // matrix.shape[1], 1))


def quantized(table: Sequence[Weight], config: QuantizationConfig | None) -> list[Weight]:
    """Quantize the rows of the table that `config` selects; each is followed by its scales.

    Raises ConfigError for a name in no_quantize_list that no layer has.
    """
    if config is None:
        return list(table)
    if config.stored is not None:
        return _as_told(table, config)
    unknown = [name for name in config.no_quantize_list if not any(_is_named(row, name) for row in table)]
    if unknown:
        layers = sorted({row.name.removesuffix(".weight") for row in table if row.multiplies})
        raise ConfigError(f"no_quantize_list must be names of layers ({', '.join(layers)}), got {', '.join(unknown)}")
    storage = Storage(config.quant_dtype, config.group, config.quantize_method == "vector_dynamic")
    rounding = config.activation_dtype is not None
    out = []
    for row in table:
        row = replace(row, split=_in_groups(row.split, config.group))
        out += _stored(row, storage, rounding) if _is_meant(row, config) else [row]
    return out


def _as_told(table: Sequence[Weight], config: QuantizationConfig) -> list[Weight]:
    """Store each matrix as `config.stored` says. If its layers differ, each way is rows of their own."""
    assert config.stored is not None
    plans = {
        name: [(Storage.of(text), layers) for text, layers in plan.items()] for name, plan in config.stored.items()
    }
    if unknown := plans.keys() - {row.name for row in table}:
        raise ConfigError(f"stored must be for matrices of the model, got {', '.join(sorted(unknown))}")
    group = math.lcm(
        *(storage.block or storage.group or 1 for plan in plans.values() for storage, _ in plan if storage)
    )
    out = []
    for row in table:
        row = replace(row, split=_in_groups(row.split, group))
        plan = plans.get(row.name, [(None, ())])
        for storage, layers in plan:
            own = row if len(plan) == 1 else replace(row, only=frozenset(layers))
            out += [own] if storage is None else _stored(own, storage, config.activation_dtype is not None)
    return out


def in_panels(table: Sequence[Weight], dtype: str) -> list[Weight]:
    """Put the matrices of linear layers, and the embedding that can be one, in panels of words.

    `dtype` is that of the activations. Types without words, and groups that words do not divide, are left unchanged.
    """
    rows = {(row.name, row.only, row.kinds): row for row in table}
    out = []
    for row in table:
        name = matrix_of(row.name)
        own = row.only, row.kinds
        if not _has_words(rows[name, *own], rows.get((name + SCALE, *own)), dtype):
            out.append(row)
        elif row.name == name:
            out.append(replace(row, word=panels.WORDS[row.dtype or dtype]))
        else:
            out.append(replace(row, word=1) if len(row.shape) == 2 else row)
    return out


def _has_words(row: Weight, scale: Weight | None, dtype: str) -> bool:
    if len(row.shape) != 2 or not (row.name.endswith(".weight") or row.name == "embed"):
        return False
    stored = row.dtype or dtype
    if scale is None:
        return stored == dtype
    grouped = len(scale.shape) == 2
    return stored in panels.WORDS and not (grouped and row.shape[1] % (scale.shape[1] * panels.WORDS[stored]))


def _is_named(row: Weight, name: str) -> bool:
    """Return whether `name` is this row's name, or whole parts of it, in the graph or in the checkpoint."""
    return any(f".{name}." in f".{full}." for full in (row.name, *row.source.split("|")))


def _is_meant(row: Weight, config: QuantizationConfig) -> bool:
    if any(_is_named(row, name) for name in config.no_quantize_list):
        return False
    if row.name == "embed":
        return config.quantize_embedding
    if row.name == "head.weight":
        return config.quantize_head
    return row.multiplies and (config.quantize_attn or not {"attn", "cross"}.intersection(row.name.split(".")))


def _in_groups(split: Split | None, group: int | None) -> Split | None:
    """Return a split that keeps groups whole, also where another layer's outputs are the inputs."""
    if split is None or group is None or isinstance(split, HeadSplit):
        return split
    return replace(split, unit=math.lcm(split.unit, group))


def _stored(row: Weight, storage: Storage, rounding: bool) -> list[Weight]:
    """Return the quantized row, and the rows of its scales, minima and order, if it has any."""
    storage = _fitting(storage, row)
    row = replace(row, rounded=storage.group or ROUNDED) if rounding else row
    (outputs, inputs), group = row.shape, storage.group
    groups = [] if group is None else [-(-inputs // group)]
    whole = inputs if group is None else groups[0] * group
    each = Fraction(8, 4 if storage.dtype in CODES else bits.BITS.get(storage.dtype, 8))  # inputs for each element
    dtype = bits.DTYPE if storage.packed else storage.dtype
    weight = _row(row, row.name, (outputs, int(whole / each)), _Part(storage, "values"), dtype, each)
    rows = [replace(weight, codes=storage.dtype if storage.dtype in CODES else "")]
    names = [(SCALE, "scales", "scale_units")] * storage.scaled
    names += [(MINIMUM, "minima", "minimum_units")] * storage.with_minima
    for end, parts, units in names:
        dtype = storage.scale_type if storage.block is None else "s8"
        rows.append(_row(row, row.name + end, (outputs, *groups), _Part(storage, parts), dtype, group))
        if block := storage.block:
            sizes, store = (outputs, -(-inputs // block)), _Part(storage, units)
            rows.append(_row(row, row.name + end + UNIT, sizes, store, storage.scale_type, block))
    if storage.by_group:
        split = replace(row.split, axis=0) if row.split and row.reduces else None
        part = _Part(storage, "order")
        order = replace(row, name=row.name + ORDER, shape=(whole,), dtype="s32", split=split, store=part)
        rows.append(replace(order, matrix=row.shape, rounded=None))
    return rows


def _fitting(storage: Storage, row: Weight) -> Storage:
    """Return `storage` with groups and blocks that divide a row's inputs, and each head if the inputs are heads.

    If zeros are added to the inputs so that they can be split, they fill the last group.
    """
    by_heads = isinstance(row.split, HeadSplit)
    if storage.group is None or (row.reduces and not by_heads):
        return storage
    whole = row.split.unit if row.reduces and row.split else row.shape[1]
    group, block = math.gcd(storage.group, whole), storage.block and math.gcd(storage.block, whole)
    if storage.packed and group % 2:
        raise ConfigError(
            f"quant_dtype={storage.dtype!r} needs an even number of inputs of {row.name}, got {row.shape[1]}"
        )
    if storage.dtype in bits.BITS and group % bits.together(storage.dtype):
        storage = replace(storage, dtype="s8")
    return replace(storage, group=group, block=block)


def _row(
    row: Weight, name: str, sizes: tuple[int, ...], store: Store, dtype: str, inputs: Fraction | int | None
) -> Weight:
    """Return a row whose elements each cover `inputs` inputs of the matrix; None means all of an output."""
    split = row.split
    if split is not None and row.reduces:
        split = replace(split, unit=split.unit // inputs) if inputs else None
    return replace(row, name=name, shape=sizes, dtype=dtype, split=split, store=store, matrix=row.shape)
