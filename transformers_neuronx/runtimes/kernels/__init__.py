"""Kernels for the CPU: composites become calls of compiled code if it was built and supports their operands.

A composite's body defines its result, and runs where no kernel does. This file decides which calls a kernel serves. It
does not know the engine that calls them.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from transformers_neuronx import env
from transformers_neuronx.errors import ConfigError
from transformers_neuronx.hlo.control import CompositeCall, composite_call
from transformers_neuronx.pyhlo import HloModuleProto
from transformers_neuronx.pyhlo.computations import remove_unreached
from transformers_neuronx.pyhlo.hlo_pb2 import (
    TUPLE,
    HloComputationProto,
    HloInstructionProto,
    PrimitiveType,
    ShapeProto,
)
from transformers_neuronx.runtimes.kernels.calls import become_call, target
from transformers_neuronx.runtimes.kernels.cuts import cut_at_once

_LOG = logging.getLogger(__name__)

FLOATS = ("f32", "bf16", "f16")
CODES = ("", "e2m1", "nf4", "fp4")  # what bytes of two weights have; the first are whole numbers

Operands = Mapping[str, Sequence[ShapeProto]]  # by name; those of a group have one name, without their numbers


class Operand(NamedTuple):
    """What a kernel takes under a name: element types, or the operand with the same type; and the rank, if not any."""

    types: Sequence[str] | str
    rank: int | None = None
    optional: bool = False

    def takes(self, shape: ShapeProto, operands: Operands) -> bool:
        types = self.types if not isinstance(self.types, str) else [_type(x) for x in operands[self.types]]
        return _type(shape) in types and self.rank in (None, len(shape.dimensions))


@dataclass(frozen=True)
class Kernel:
    """What a kernel takes: its operands, in the order of its handler, and the attributes that it reads, with types.

    An attribute that is None or missing is 0. `fits` says what else a call's attributes and operands must be. The last
    results are what is `updated`, an operand or a group, in the same memory.
    """

    operands: Mapping[str, Operand]
    attributes: Mapping[str, str] = field(default_factory=dict)
    fits: Callable[[Mapping[str, Any], Operands], bool] = lambda *_: True
    updated: str = ""

    def serves(self, attributes: Mapping[str, Any], shapes: Mapping[str, ShapeProto]) -> bool:
        operands: dict[str, list[ShapeProto]] = {name: [] for name in self.operands}
        for name, shape in shapes.items():
            operands.setdefault(_without_numbers(name), []).append(shape)
        return (
            operands.keys() == self.operands.keys()
            and all(given or self.operands[name].optional for name, given in operands.items())
            and all(self.operands[name].takes(x, operands) for name, given in operands.items() for x in given)
            and self.fits(attributes, operands)
        )

    def in_order(self, names: Iterable[str]) -> list[str]:
        order = [name.partition(".")[0] for name in self.operands]  # a group stays as it is
        return sorted(names, key=lambda name: order.index(name.partition(".")[0]))


def _without_numbers(name: str) -> str:
    return ".".join(part for part in name.split(".") if not part.isdigit())


def _type(shape: ShapeProto) -> str:
    return PrimitiveType.Name(shape.element_type).lower()


class _Sizes(NamedTuple):
    """The type and the sizes of a part of a linear layer; of one expert."""

    dtype: str
    axes: tuple[int, ...]


def _linear(attributes: Mapping[str, Any], operands: Operands) -> bool:
    names = ("weight", "scale", "minimum", "scale_unit", "minimum_unit", "bias")
    stacked = len(operands["experts"])
    parts = [[_Sizes(_type(x), tuple(x.dimensions[stacked:])) for x in operands[f"parts.{name}"]] for name in names]
    weights, scales, minima, *units, biases = parts
    complete = all(len(given) in (0, len(weights)) for given in parts)
    panels = all(len(x.axes) == 4 for x in [*weights, *minima, *units[0], *units[1]])
    alike = [*scales, *minima], [*units[0], *units[1]]
    sizes = [{(x.dtype, *x.axes[1:]) for x in each} for each in alike]
    one_kind = len({x.dtype for x in weights}) == 1 and all(len(each) <= 1 for each in sizes)
    one_stack = len({x.dimensions[0] for name in names for x in operands[f"parts.{name}"]}) == 1
    if not complete or not panels or not one_kind or not _within("parts", len(weights)):
        return False
    if any(len(x.axes) != 1 for x in biases) or (stacked and not (one_stack and len(operands["x"][0].dimensions) == 2)):
        return False
    two_levels = bool(alike[1]) or any(x.dtype == "s8" for x in scales)
    if two_levels and not _in_levels(scales, minima, *units):
        return False
    codes, rounded = attributes.get("codes") or "", attributes.get("rounded", 0)
    if codes not in CODES or (codes and weights[0].dtype != "u8"):
        return False
    if (minima or rounded or two_levels) and (codes or weights[0].dtype == "f8e4m3fn"):
        return False
    return _multiplies(rounded, operands["x"][0], weights[0], *scales[:1])


def _in_levels(*parts: Sequence[_Sizes]) -> bool:
    """Whether scales and minima are whole numbers with units, each of as many groups."""
    scales, minima, units, units_of_minima = parts
    if not scales or len(scales) != len(units) or len(minima) != len(units_of_minima):
        return False
    dtype, axes = scales[0]
    return dtype == "s8" and len(axes) == 4 and axes[1] % units[0].axes[1] == 0


def _multiplies(rounded: int, x: ShapeProto, weight: _Sizes, scale: _Sizes | None = None) -> bool:
    stored = weight.dtype
    if scale is None:
        return stored == _type(x) and not rounded
    inputs, word = x.dimensions[-1], 4
    if stored == "u8":
        bits, rest = divmod(32 * weight.axes[1], inputs)
        if rest or bits not in (4, 5, 6):
            return False
        word = {4: 8, 5: 32, 6: 16}[bits]  # inputs whose bits are together
    groups = {rounded} - {0}
    if len(scale.axes) > 1:
        groups.add(inputs // scale.axes[1] if inputs % scale.axes[1] == 0 else 1)
    # By how much products are larger than those of s4: sums of a group are of 32 bits.
    eight = stored == "s8" and not rounded and _type(x) != "f32"
    larger = 8 if eight else 4 if word > 8 else 1
    alike = len(groups) < 2 and all(_within("group", larger * group) and group % word == 0 for group in groups)
    of_each = scale.dtype == "f32" and len(scale.axes) == 1 and stored != "u8"
    return alike and (of_each or len(scale.axes) == 4)


def _attention(_: Mapping[str, Any], operands: Operands) -> bool:
    [q], cached = operands["q"], [_type(x) for x in operands["cache"]]
    parts = 1 + len(operands["v"])  # keys that are values, too, are there once
    known = cached in ([_type(q)] * parts, ["s8"] * parts + ["f32"] * parts) and _within("head", q.dimensions[-1])
    return known and all(_within("biases", math.prod(x.dimensions)) for x in operands["distances"])


def _paged_attention(attributes: Mapping[str, Any], operands: Operands) -> bool:
    page = operands["cache"][0].dimensions[1]
    return _attention(attributes, operands) and page % limits().get("page", 1) == 0 and page & (page - 1) == 0


def _attend_to(_: Mapping[str, Any], operands: Operands) -> bool:
    [q], [values], biases = (operands[name] for name in ("q", "values", "bias"))
    near = all(_within("biases", math.prod(bias.dimensions)) for bias in biases)
    return near and q.dimensions[-1] == values.dimensions[-1] and _within("head", q.dimensions[-1])


def _put_rows(_: Mapping[str, Any], operands: Operands) -> bool:
    [x], [rows] = operands["x"], operands["rows"]
    return len(x.dimensions) > 1 and x.dimensions[1:] == rows.dimensions[1:]


def _lora(_: Mapping[str, Any], operands: Operands) -> bool:
    [y], [x], [adapters] = operands["y"], operands["x"], operands["adapters"]
    return _type(y) in (_type(x), "f32") and x.dimensions[:1] == adapters.dimensions


def _within(limit: str, size: int) -> bool:
    return size <= limits().get(limit, size)


_PER_ROW, _TABLE, _RANK_3, _RANK_4 = Operand(["s32"], 1), Operand(["s32"], 2), Operand(["f32"], 3), Operand(["f32"], 4)
_NEW = dict(q=Operand(FLOATS, 4), k=Operand("q", 4), v=Operand("q", 4, optional=True))
_CACHE = Operand((*FLOATS, "s8"), 3)
_OF_HEADS = Operand(["f32"], 1, optional=True)
_BIASES = dict(alibi=_OF_HEADS, distances=_OF_HEADS._replace(rank=2), sinks=_OF_HEADS)
_RULES = dict(scale="f32", softcap="f32", window="i64", chunk="i64")
_LINEAR_ATTENTION = Kernel(
    dict(q=_RANK_4, k=_RANK_4, v=_RANK_4, decay=_RANK_3, beta=_RANK_3, table=_TABLE, memory=_RANK_4),
    fits=lambda _, operands: _within("key", operands["k"][0].dimensions[-1]),
    updated="memory",
)

KERNELS: Mapping[str, Kernel] = dict(
    linear=Kernel(
        {
            "x": Operand(FLOATS),
            "experts": Operand(["s32"], 1, optional=True),
            "parts.weight": Operand((*FLOATS, "s8", "u8", "f8e4m3fn")),  # in panels; with experts, stacks of them
            "parts.scale": Operand((*FLOATS, "s8"), optional=True),
            "parts.minimum": Operand("parts.scale", optional=True),
            "parts.scale_unit": Operand(FLOATS, optional=True),
            "parts.minimum_unit": Operand(FLOATS, optional=True),
            "parts.bias": Operand("x", optional=True),
            "residual": Operand(FLOATS, optional=True),  # that `_add_within` finds
        },
        dict(rounded="i64", activation="string", codes="string"),
        _linear,
    ),
    attention=Kernel(
        _NEW | dict(start=_PER_ROW, length=_PER_ROW, cache=_CACHE, slots=_PER_ROW._replace(optional=True)) | _BIASES,
        _RULES,
        _attention,
        updated="cache",
    ),
    paged_attention=Kernel(
        _NEW | dict(segments=_TABLE, cache=_CACHE) | _BIASES, _RULES, _paged_attention, updated="cache"
    ),
    attend_to=Kernel(
        dict(
            q=Operand(FLOATS, 4),
            keys=Operand("q", 4),
            values=Operand("q", 4),
            lengths=_PER_ROW,
            slots=_PER_ROW._replace(optional=True),
            bias=Operand(["f32"], 4, optional=True),
        ),
        dict(scale="f32"),
        _attend_to,
    ),
    sample=Kernel(dict(logits=Operand(["f32"], 2), seen=Operand(["pred"], 2), policy=_TABLE, position=_PER_ROW)),
    with_tokens=Kernel(
        dict(seen=Operand(["pred"], 2), tokens=_PER_ROW, slots=_PER_ROW._replace(optional=True)), updated="seen"
    ),
    advance=Kernel(
        dict(sampled=_PER_ROW, token=_PER_ROW, left=_PER_ROW, eos=_TABLE, at=Operand(["s32"], 0), tokens=_TABLE),
        updated="tokens",
    ),
    put_rows=Kernel(
        dict(x=Operand((*FLOATS, "s8")), rows=Operand("x"), at=Operand(["s32"], 0)), fits=_put_rows, updated="x"
    ),
    layer_norm=Kernel(dict(x=Operand(FLOATS), weight=Operand(["f32"], 1), bias=Operand(["f32"], 1)), dict(eps="f32")),
    rms_norm=Kernel(dict(x=Operand(FLOATS), weight=Operand(["f32"], 1)), dict(eps="f32")),
    lora=Kernel(
        dict(y=Operand(FLOATS), x=Operand(FLOATS), a=Operand("x", 2), b=Operand("x", 2), adapters=_PER_ROW),
        dict(rank="i64"),
        _lora,
        updated="y",
    ),
    short_convolution=Kernel(
        dict(x=Operand(FLOATS, 3), weight=Operand(["f32"], 2), table=_TABLE, state=_RANK_3, bias=_OF_HEADS),
        dict(activation="string"),
        lambda _, operands: _within("taps", operands["weight"][0].dimensions[0]),
        updated="state",
    ),
    gated_delta_rule=_LINEAR_ATTENTION,
    selective_scan=_LINEAR_ATTENTION,
)


def serves(call: CompositeCall, shapes: Sequence[ShapeProto]) -> bool:
    """Whether a kernel serves the call of a composite with operands of these shapes."""
    kernel = KERNELS.get(call.name)
    return kernel is not None and kernel.serves(call.attributes, dict(zip(call.operands, shapes, strict=True)))


def updated(call: CompositeCall) -> list[int]:
    """Return the operands, by number, in whose memory a kernel returns its last results."""
    group = KERNELS[call.name].updated if call.name in KERNELS else ""
    return [number for name, number in call.operands.items() if _without_numbers(name) == group]


@functools.cache
def built() -> Any:
    """Return the library of kernels, or None if it was not built."""
    try:
        return importlib.import_module("transformers_neuronx.runtimes.kernels._kernels")
    except ImportError:
        _LOG.warning(
            "the kernels were not built: using XLA's own code, which reads weights of 16 bits or fewer up to fifteen "
            "times slower. Install a C++ compiler, and then install the package again"
        )
        return None


@functools.cache
def limits() -> Mapping[str, int]:
    """Return the largest sizes that the library takes, by name. If it was not built, sizes have no limits."""
    library = built()
    return {} if library is None else library.limits()


@functools.cache
def level() -> str:
    """Return the instruction-set level that NEURONX_KERNELS selects, or "off"."""
    wanted = env.KERNELS.get()
    if wanted == "off" or (library := built()) is None:
        return "off"
    levels = library.levels()
    if not levels:
        _LOG.warning(
            "the kernels were built for another processor: using XLA's own code, which is slower. Install the package "
            "again here; with NEURONX_BUILD_LEVELS=all it runs on any processor"
        )
        return "off"
    if wanted not in ("auto", *levels):
        raise ConfigError(f"{env.KERNELS.name} must be auto, off, {' or '.join(levels)}, got {wanted!r}")
    chosen: str = levels[-1] if wanted == "auto" else wanted
    library.set_level(chosen)
    return chosen


def handlers() -> Mapping[str, Any]:
    """Return what to register for each call that `with_kernels` writes: a capsule with its function."""
    return {} if level() == "off" else {target(name): handler for name, handler in built().handlers().items()}


def attends_in_place(cached: str, head_dim: int) -> bool:
    """Whether a kernel serves attention over a cache of this type, for any number of tokens."""
    return level() != "off" and cached in (*FLOATS, "s8") and _within("head", head_dim)


def fingerprint() -> str:
    """Return what identifies the kernels. Executables call them, but do not contain them."""
    return "off" if level() == "off" else f"{level()} {hashlib.sha256(Path(built().__file__).read_bytes()).hexdigest()}"


def spent() -> Mapping[str, tuple[int, float]]:
    """Return the calls of each kernel since the process started, and the seconds that they took."""
    return {} if level() == "off" else built().spent()


def with_kernels(module: HloModuleProto) -> HloModuleProto:
    """Return the module with calls of kernels in place of the composites that they serve."""
    if level() == "off":
        return module
    module = HloModuleProto.FromString(module.SerializeToString())
    for computation in module.computations:
        _add_within(computation, _serve(computation))
    cut_at_once(module)
    remove_unreached(module)
    return module


def _serve(computation: HloComputationProto) -> Mapping[int, CompositeCall]:
    """Replace composites with calls of kernels. Returns the calls of linear layers with one result, by number."""
    shapes = {instruction.id: instruction.shape for instruction in computation.instructions}
    layers = {}
    for instruction in computation.instructions:
        call = composite_call(instruction)
        if call and serves(call, [shapes[number] for number in instruction.operand_ids]):
            _become_kernel(instruction, call, shapes)
            alone = "experts" not in call.operands and instruction.shape.element_type != TUPLE
            if call.name == "linear" and alone:
                layers[instruction.id] = call
    return layers


def _add_within(computation: HloComputationProto, layers: Mapping[int, CompositeCall]) -> None:
    """Let a linear layer's kernel add what the program adds to its result, if nothing else uses that result.

    The sum becomes the kernel's call. The layer's own call is then unused, so XLA leaves it out.
    """
    shapes = {instruction.id: instruction.shape for instruction in computation.instructions}
    uses = Counter(number for instruction in computation.instructions for number in instruction.operand_ids)
    for total in computation.instructions:
        added = list(total.operand_ids) if total.opcode == "add" else []
        if alone := [number for number in added if number in layers and uses[number] == 1]:
            added.remove(alone[0])
            layer = layers[alone[0]]
            _become_kernel(total, layer._replace(operands={**layer.operands, "residual": added[0]}), shapes)


def _become_kernel(instruction: HloInstructionProto, call: CompositeCall, shapes: Mapping[int, ShapeProto]) -> None:
    kernel = KERNELS[call.name]
    names = kernel.in_order(call.operands)
    updated = [place for place, name in enumerate(names) if _without_numbers(name) == kernel.updated]
    first = len(instruction.shape.tuple_shapes) - len(updated)
    for array, place in enumerate(updated, first):
        index = [array] if instruction.shape.element_type == TUPLE else []
        instruction.output_operand_aliasing.add(output_shape_index=index, operand_index=place)
    typed = {key: _as_typed(call.attributes.get(key), kind) for key, kind in kernel.attributes.items()}
    become_call(instruction, call.name, {name: call.operands[name] for name in names}, shapes, typed)


def _as_typed(value: Any, kind: str) -> str:
    if kind == "string":
        return json.dumps(value or "")
    return f"{float(value or 0):e} : f32" if kind == "f32" else f"{int(value or 0)} : {kind}"
