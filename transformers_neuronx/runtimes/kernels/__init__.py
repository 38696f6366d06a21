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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers_neuronx import env
from transformers_neuronx.errors import ConfigError
from transformers_neuronx.hlo.control import COMPOSITE_ATTRIBUTES, COMPOSITE_NAME
from transformers_neuronx.pyhlo import HloModuleProto
from transformers_neuronx.pyhlo.computations import remove_unreached
from transformers_neuronx.pyhlo.hlo_pb2 import (
    API_VERSION_TYPED_FFI,
    TUPLE,
    HloComputationProto,
    HloInstructionProto,
    PrimitiveType,
    ShapeProto,
)

_LOG = logging.getLogger(__name__)

LARGEST_GROUP = 4096  # of inputs, so that their sums fit into 32 bits
LONGEST_HEAD = 256
MOST_BIASES = 2**31 - 1  # so that their offsets fit into 32 bits
CACHE = dict(attention=5, paged_attention=4)  # the first operand that belongs to the cache
PAGE = 16  # positions of a page: this or a larger power of two
FLOATS = ("f32", "bf16", "f16")
MOST_PARTS = 3  # of one linear layer


_ATTENTION = dict(scale="f32", softcap="f32", window="i64") | dict.fromkeys(
    ("arrays", "own_slots", "alibi", "distances"), "i64"
)
# Attributes that a kernel reads, with their types there. None becomes 0, and so does an attribute that is missing.
ATTRIBUTES: Mapping[str, Mapping[str, str]] = dict(
    linear=dict(parts="i64", scaled="i64", biased="i64", rounded="i64", activation="string", residual="i64"),
    attention=_ATTENTION,
    paged_attention=_ATTENTION,
    attend_to=dict(scale="f32"),
    layer_norm=dict(eps="f32"),
    rms_norm=dict(eps="f32"),
    sample={},
)


def _types(*shapes: ShapeProto) -> list[str]:
    return [PrimitiveType.Name(shape.element_type).lower() for shape in shapes]


def _linear(attributes: Mapping[str, Any], x: ShapeProto, *operands: ShapeProto) -> bool:
    each = len(operands) // attributes["parts"]
    parts = [operands[first : first + each] for first in range(0, len(operands), each)]
    kinds = {(*_types(*part), *(part[1].dimensions[1:] if attributes["scaled"] else ())) for part in parts}
    if len(kinds) > 1 or len(parts) > MOST_PARTS or (attributes["biased"] and _types(operands[-1]) != _types(x)):
        return False
    return bool(attributes["panels"]) and _multiplies(attributes["rounded"], x, *operands[: 1 + attributes["scaled"]])


def _multiplies(rounded: int, x: ShapeProto, weight: ShapeProto, scale: ShapeProto | None = None) -> bool:
    [active, stored] = _types(x, weight)
    if scale is None or active not in FLOATS:
        return stored == active in FLOATS and not rounded
    inputs, word = x.dimensions[-1], 8 if stored == "u8" else 4
    groups = {rounded} - {0}
    if len(scale.dimensions) > 1:
        groups.add(inputs // scale.dimensions[1] if inputs % scale.dimensions[1] == 0 else 1)
    alike = len(groups) < 2 and all(group <= LARGEST_GROUP and group % word == 0 for group in groups)
    kind = stored, *_types(scale), len(scale.dimensions)
    return alike and kind in (("u8", "bf16", 4), ("s8", "f32", 4), ("s8", "f32", 1))


def _attention(attributes: Mapping[str, Any], *operands: ShapeProto, name: str = "attention") -> bool:
    q, cache = operands[0], operands[CACHE[name]]
    [active, cached] = _types(q, cache)
    known = active in FLOATS and attributes["arrays"] == (4 if cached == "s8" else 2) and cached in (active, "s8")
    return known and q.dimensions[-1] <= LONGEST_HEAD


def _paged_attention(attributes: Mapping[str, Any], *operands: ShapeProto) -> bool:
    page = operands[CACHE["paged_attention"]].dimensions[1]
    return _attention(attributes, *operands, name="paged_attention") and page % PAGE == 0 and page & (page - 1) == 0


def _attend_to(attributes: Mapping[str, Any], q: ShapeProto, *more: ShapeProto) -> bool:
    [active, *rest] = _types(q, *more)
    known = active in FLOATS and rest[:2] == [active] * 2 and rest[3:] in ([], ["f32"])
    near = all(math.prod(bias.dimensions) <= MOST_BIASES for bias in more[3:])
    return known and near and q.dimensions[-1] == more[1].dimensions[-1] <= LONGEST_HEAD


def _sample(attributes: Mapping[str, Any], logits: ShapeProto, *more: ShapeProto) -> bool:
    return _types(logits) == ["f32"]


def _norm(attributes: Mapping[str, Any], x: ShapeProto, *weights: ShapeProto) -> bool:
    return _types(x)[0] in FLOATS and set(_types(*weights)) == {"f32"}


ACCEPTS: Mapping[str, Callable[..., bool]] = dict(
    linear=_linear,
    attention=_attention,
    paged_attention=_paged_attention,
    attend_to=_attend_to,
    layer_norm=_norm,
    rms_norm=_norm,
    sample=_sample,
)


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
    return level() != "off" and cached in (*FLOATS, "s8") and head_dim <= LONGEST_HEAD


def fingerprint() -> str:
    """Return what identifies the kernels. Executables call them, but do not contain them."""
    return "off" if level() == "off" else f"{level()} {hashlib.sha256(Path(built().__file__).read_bytes()).hexdigest()}"


def spent() -> Mapping[str, tuple[int, float]]:
    """Return the calls of each kernel since the process started, and the seconds that they took."""
    return {} if level() == "off" else built().spent()


def target(name: str) -> str:
    """Return the name under which a kernel's handler is registered."""
    return f"transformers_neuronx.{name}"


def with_kernels(module: HloModuleProto) -> HloModuleProto:
    """Return the module with calls of kernels in place of the composites that they serve."""
    if level() == "off":
        return module
    module = HloModuleProto.FromString(module.SerializeToString())
    for computation in module.computations:
        _add_within(computation, _serve(computation))
    remove_unreached(module)
    return module


def _serve(computation: HloComputationProto) -> Mapping[int, Mapping[str, Any]]:
    """Replace composites with calls of kernels. Returns the attributes of linear layers with one result, by number."""
    shapes = {instruction.id: instruction.shape for instruction in computation.instructions}
    layers = {}
    for instruction in computation.instructions:
        name = instruction.frontend_attributes.map.get(COMPOSITE_NAME, "")
        operands = [shapes[number] for number in instruction.operand_ids]
        attributes = json.loads(instruction.frontend_attributes.map.get(COMPOSITE_ATTRIBUTES, "{}"))
        if name in ACCEPTS and ACCEPTS[name](attributes, *operands):
            _become_kernel(instruction, name, operands, attributes)
            if name == "linear" and instruction.shape.element_type != TUPLE:
                layers[instruction.id] = attributes
    return layers


def _add_within(computation: HloComputationProto, layers: Mapping[int, Mapping[str, Any]]) -> None:
    """Let a linear layer's kernel add what the program adds to its result, if nothing else uses that result.

    The sum becomes the kernel's call. The layer's own call is then unused, so XLA leaves it out.
    """
    by_id = {instruction.id: instruction for instruction in computation.instructions}
    uses = Counter(number for instruction in computation.instructions for number in instruction.operand_ids)
    for total in computation.instructions:
        added = list(total.operand_ids) if total.opcode == "add" else []
        if alone := [number for number in added if number in layers and uses[number] == 1]:
            added.remove(alone[0])
            total.operand_ids[:] = [*by_id[alone[0]].operand_ids, *added]
            operands = [by_id[number].shape for number in total.operand_ids]
            _become_kernel(total, "linear", operands, {**layers[alone[0]], "residual": True})


def _become_kernel(
    instruction: HloInstructionProto, name: str, operands: Sequence[ShapeProto], attributes: Mapping[str, Any]
) -> None:
    instruction.opcode = "custom-call"
    instruction.custom_call_target = target(name)
    instruction.custom_call_api_version = API_VERSION_TYPED_FFI
    instruction.constrain_layout = True
    instruction.operand_shapes_with_layout.extend(operands)
    for array in range(attributes.get("arrays", 0)):  # the cache's arrays follow the first result
        instruction.output_operand_aliasing.add(output_shape_index=[1 + array], operand_index=CACHE[name] + array)
    typed = [f"{key} = {_as_typed(attributes.get(key), kind)}" for key, kind in ATTRIBUTES[name].items()]
    instruction.backend_config = f"{{{', '.join(typed)}}}".encode()
    instruction.ClearField("called_computation_ids")
    instruction.ClearField("frontend_attributes")


def _as_typed(value: Any, kind: str) -> str:
    if kind == "string":
        return json.dumps(value)
    return f"{float(value or 0):e} : f32" if kind == "f32" else f"{int(value or 0)} : {kind}"
