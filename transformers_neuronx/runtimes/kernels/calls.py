"""Calls of kernels in a module: custom calls with named operands."""

from __future__ import annotations

import json
from collections.abc import Mapping

from transformers_neuronx.pyhlo.hlo_pb2 import API_VERSION_TYPED_FFI, HloInstructionProto, ShapeProto


def target(name: str) -> str:
    """Return the name under which a kernel's handler is registered."""
    return f"transformers_neuronx.{name}"


def become_call(
    instruction: HloInstructionProto,
    kernel: str,
    operands: Mapping[str, int],
    shapes: Mapping[int, ShapeProto],
    attributes: Mapping[str, str],
) -> None:
    """Make an instruction call a kernel. Operands are the ids of instructions by name; attributes have their types."""
    instruction.opcode = "custom-call"
    instruction.custom_call_target = target(kernel)
    instruction.custom_call_api_version = API_VERSION_TYPED_FFI
    instruction.constrain_layout = True
    instruction.operand_ids[:] = operands.values()
    instruction.operand_shapes_with_layout.extend(shapes[number] for number in instruction.operand_ids)
    typed = dict(attributes, operands=json.dumps(" ".join(operands)))
    instruction.backend_config = f"{{{', '.join(f'{key} = {value}' for key, value in typed.items())}}}".encode()
    instruction.ClearField("called_computation_ids")
    instruction.ClearField("frontend_attributes")
