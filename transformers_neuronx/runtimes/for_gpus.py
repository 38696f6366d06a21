"""What is different on GPUs: what modules need before XLA compiles them, and what an error there may mean.

XLA's default for products of f32 there is TF32: it rounds both operands to 10 bits of mantissa, so that logits differ
from the CPU's by 1e-3 of the largest. They are computed in f32, which is PyTorch's default, too.

For products of s8 summed in s32, jaxlib 0.11.2 returned twice the result on an H200, wherever it chose cuBLAS. Operands
are widened to s32 first.

Modules reach XLA's GPU plugin as StableHLO, which has no copy. A barrier keeps a value apart from its original as well.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from transformers_neuronx.pyhlo import HloModuleProto
from transformers_neuronx.pyhlo.hlo_pb2 import F32, S8, S32, HloInstructionProto, PrecisionConfig, ShapeProto

HIGHEST = [PrecisionConfig.HIGHEST] * 2  # of both operands


def for_gpus(module: HloModuleProto) -> HloModuleProto:
    """Return the module with products of f32 at the highest precision, those of s8 in s32, and barriers for copies."""
    module = HloModuleProto.FromString(module.SerializeToString())
    numbers = [number for each in module.computations for number in (each.id, *(one.id for one in each.instructions))]
    free = itertools.count(max(numbers) + 1)
    for computation in module.computations:
        shapes = {each.id: each.shape for each in computation.instructions}
        instructions = [new for each in computation.instructions for new in _for_gpus(each, shapes, free)]
        del computation.instructions[:]
        computation.instructions.extend(instructions)
    return module


def _for_gpus(
    each: HloInstructionProto, shapes: Mapping[int, ShapeProto], free: Iterator[int]
) -> Iterator[HloInstructionProto]:
    types = {shapes[number].element_type for number in each.operand_ids}
    if each.opcode in ("dot", "convolution") and types == {F32}:
        each.precision_config.operand_precision[:] = HIGHEST
    elif each.opcode == "dot" and types == {S8} and each.shape.element_type == S32:
        wide = [_widened(number, shapes[number], next(free)) for number in each.operand_ids]
        each.operand_ids[:] = [operand.id for operand in wide]
        yield from wide
    elif each.opcode == "copy":
        each.opcode = "opt-barrier"
    yield each


def _widened(number: int, shape: ShapeProto, free: int) -> HloInstructionProto:
    wide = HloInstructionProto(id=free, name=f"convert.{free}", opcode="convert", shape=shape, operand_ids=[number])
    wide.shape.element_type = S32
    return wide


def full(error: Exception) -> str:
    """Return a hint to add to an error of XLA, if it says that a GPU has no memory left."""
    if "memory" not in str(error) or not any(name in str(error) for name in ("GPU", "CUDA")):
        return ""
    return (
        ". If other processes use this GPU too: each takes three quarters of its memory when it starts, unless "
        "XLA_PYTHON_CLIENT_PREALLOCATE is false or XLA_PYTHON_CLIENT_MEM_FRACTION is lower."
    )
