"""PyHLO: XLA's High Level Operations written from Python."""

from transformers_neuronx.pyhlo.hlo_pb2 import HloModuleProto as HloModuleProto
from transformers_neuronx.pyhlo.scribe import (
    DType as DType,
    HloScribe as HloScribe,
    Shape as Shape,
    Tensor as Tensor,
    TupleShape as TupleShape,
    active_scribe as active_scribe,
    dtype_named as dtype_named,
)
