"""A module as text for people, made from the module alone: an engine's own text would need the engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf import text_format

from transformers_neuronx.analysis.inspection.flow import composite_of
from transformers_neuronx.pyhlo import HloModuleProto
from transformers_neuronx.pyhlo.hlo_pb2 import HloComputationProto, HloInstructionProto
from transformers_neuronx.pyhlo.shapes import shape_text

LONGEST = 60  # characters of a constant
_SAID = frozenset(  # shown elsewhere in the line, or in the shape
    """
    name opcode shape metadata literal id operand_ids called_computation_ids tuple_index parameter_number
    operand_shapes_with_layout
    """.split()
)


def hlo_text(module: HloModuleProto) -> str:
    """Format a module with a line for each instruction: name, shape, opcode, operands, other fields, and scope."""
    names = {computation.id: computation.name for computation in module.computations}
    blocks = [f"module {module.name}"]
    for computation in module.computations:
        entry = "entry " if computation.id == module.entry_computation_id else ""
        lines = "\n".join(f"  {line}" for line in _lines(computation, names))
        blocks.append(f"{entry}{computation.name} {{\n{lines}\n}}")
    return "\n\n".join(blocks) + "\n"


def _lines(computation: HloComputationProto, names: dict[int, str]) -> Iterator[str]:
    by_id = {instruction.id: instruction.name for instruction in computation.instructions}
    for each in computation.instructions:
        root = "root " if each.id == computation.root_id else ""
        operands = ", ".join([*(by_id[number] for number in each.operand_ids), *_own(each)])
        called = ", ".join(names[number] for number in each.called_computation_ids)
        what = f"{root}{each.name} = {shape_text(each.shape)} {each.opcode}({operands})"
        text = "; ".join([what, *([f"calls {called}"] if called else []), *_fields(each)])
        yield f"{text}  # {_origin(each)}"


def _own(instruction: HloInstructionProto) -> list[str]:
    """Return what is shown in the place of operands."""
    if instruction.opcode == "parameter":
        return [str(instruction.parameter_number)]
    if instruction.opcode == "get-tuple-element":
        return [str(instruction.tuple_index)]
    if instruction.opcode != "constant":
        return []
    values: Any = next((value for field, value in instruction.literal.ListFields() if field.name != "shape"), [])
    text = values.hex() if isinstance(values, bytes) else ", ".join(map(str, values))
    return [text if len(text) <= LONGEST else f"{text[:LONGEST]}…"]


def _fields(instruction: HloInstructionProto) -> Iterator[str]:
    for field, value in instruction.ListFields():
        if field.name in _SAID:
            continue
        if field.name == "frontend_attributes":
            yield from (f"{key}={value.map[key]}" for key in sorted(value.map))
        else:
            yield f"{field.name}={_as_text(value)}"


def _as_text(value: Any) -> str:
    if hasattr(value, "ListFields"):
        return f"{{{text_format.MessageToString(value, as_one_line=True).strip()}}}"
    if isinstance(value, bytes | str | int | float):
        return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    return f"[{', '.join(map(_as_text, value))}]"


def _origin(instruction: HloInstructionProto) -> str:
    """Return the scope, the name of a composite, and the line of code that wrote the instruction."""
    scope, metadata = instruction.metadata.op_name.rpartition("/")[0], instruction.metadata
    line = f"{Path(metadata.source_file).name}:{metadata.source_line}" if metadata.source_file else ""
    return " ".join(filter(None, [scope, composite_of(instruction), line]))
