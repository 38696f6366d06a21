"""What a program cuts out of a parameter of integers, in one call.

A step has its integers in one array, for one transfer. XLA would compile each cut as a kernel of its own, which takes a
core 12 to 25 ms.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from transformers_neuronx.hlo.control import WEIGHT
from transformers_neuronx.pyhlo.computations import entry_of
from transformers_neuronx.pyhlo.hlo_pb2 import (
    S32,
    TUPLE,
    HloComputationProto,
    HloInstructionProto,
    HloModuleProto,
    ShapeProto,
)
from transformers_neuronx.runtimes.kernels.calls import become_call

Sizes: TypeAlias = tuple[int, ...]


class Cut(NamedTuple):
    """Numbers of a parameter: `rows` of `width` each, the first at `first`, and `pitch` from one to the next."""

    source: int  # the parameter's id
    first: int
    rows: int
    pitch: int
    width: int

    def cut(self, sizes: Sequence[int], ranges: Sequence[tuple[int, int]]) -> Cut | None:
        """Return what a slice of these numbers is, if they have these `sizes`. None if it is empty or no rows."""
        *lead, columns = sizes
        (top, bottom), (left, right) = [(0, 1), *ranges][-2:]
        rows = lead[0] if lead else 1
        if len(lead) > 1 or (self.rows > 1 and (self.rows, self.width) != (rows, columns)):
            return None
        pitch = self.pitch if self.rows > 1 else columns
        count, width = bottom - top, right - left
        if not count * width:
            return None
        if width == pitch or count == 1:  # adjacent
            return Cut(self.source, self.first + top * pitch + left, 1, count * width, count * width)
        return Cut(self.source, self.first + top * pitch + left, count, pitch, width)


def cut_at_once(module: HloModuleProto) -> None:
    """Cut each parameter of integers in one call. What uses its pieces takes the results of the call."""
    entry = entry_of(module)
    pieces = defaultdict[int, dict[tuple[Cut, Sizes], list[HloInstructionProto]]](lambda: defaultdict(list))
    for piece, cut in _pieces(entry):
        pieces[cut.source][cut, tuple(piece.shape.dimensions)].append(piece)
    if not pieces:
        return
    last = max(each.id for computation in module.computations for each in computation.instructions)
    shapes = {each.id: each.shape for each in entry.instructions}
    for number, (source, found) in enumerate(pieces.items(), last + 1):
        call = HloInstructionProto(id=number, name=f"cut.{number}")
        call.shape.element_type = TUPLE
        call.shape.tuple_shapes.extend(alike[0].shape for alike in found.values())
        places = ", ".join(str(size) for cut, _ in found for size in cut[1:])
        become_call(call, "cut", dict(x=source), shapes, dict(places=f"array<i64: {places}>"))
        for index, alike in enumerate(found.values()):
            for piece in alike:
                piece.opcode, piece.tuple_index, piece.operand_ids[:] = "get-tuple-element", index, [call.id]
                piece.ClearField("slice_dimensions")
        place = next(place for place, each in enumerate(entry.instructions) if each.id == source)
        entry.instructions.insert(place + 1, call)


def _pieces(entry: HloComputationProto) -> Iterator[tuple[HloInstructionProto, Cut]]:
    """Yield the instructions that cut parameters and nothing else, if others use their results."""
    cuts: dict[int, Cut] = {}
    shapes, used = {each.id: each.shape for each in entry.instructions}, {entry.root_id}
    for each in entry.instructions:
        cut = _cut(each, shapes, cuts)
        if cut:
            cuts[each.id] = cut
        else:
            used.update(each.operand_ids)
    for each in entry.instructions:
        if each.id in used and each.id in cuts and cuts[each.id] != cuts[cuts[each.id].source]:
            yield each, cuts[each.id]


def _cut(each: HloInstructionProto, shapes: Mapping[int, ShapeProto], cuts: Mapping[int, Cut]) -> Cut | None:
    if each.opcode == "parameter" and each.shape.element_type == S32 and WEIGHT not in each.frontend_attributes.map:
        size = math.prod(each.shape.dimensions)
        return Cut(each.id, 0, 1, size, size) if each.shape.dimensions else None
    if each.opcode not in ("reshape", "slice") or each.operand_ids[0] not in cuts or not each.shape.dimensions:
        return None
    whole = cuts[each.operand_ids[0]]
    if each.opcode == "reshape":
        return whole
    if any(axis.stride != 1 for axis in each.slice_dimensions):
        return None
    ranges = [(axis.start, axis.limit) for axis in each.slice_dimensions]
    return whole.cut(shapes[each.operand_ids[0]].dimensions, ranges)
