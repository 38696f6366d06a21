"""Products of f32 on GPUs, computed in f32.

XLA's default there is TF32: it rounds both operands to 10 bits of mantissa, so that logits differ from the CPU's by
1e-3 of the largest. PyTorch's default is f32, too.
"""

from __future__ import annotations

from transformers_neuronx.pyhlo import HloModuleProto
from transformers_neuronx.pyhlo.hlo_pb2 import F32, PrecisionConfig

HIGHEST = [PrecisionConfig.HIGHEST] * 2  # of both operands


def in_f32(module: HloModuleProto) -> HloModuleProto:
    """Return the module with all products of f32 at XLA's highest precision."""
    module = HloModuleProto.FromString(module.SerializeToString())
    for computation in module.computations:
        types = {each.id: each.shape.element_type for each in computation.instructions}
        for each in computation.instructions:
            if each.opcode in ("dot", "convolution") and all(types[number] == F32 for number in each.operand_ids):
                each.precision_config.operand_precision[:] = HIGHEST
    return module
