"""PyHLO: XLA's High Level Operations written from Python."""

from transformers_neuronx.pyhlo.hlo_pb2 import HloModuleProto as HloModuleProto
from transformers_neuronx.pyhlo.scribe import HloScribe as HloScribe
from transformers_neuronx.pyhlo.tensors import (
    DType as DType,
    Scribe as Scribe,
    Shape as Shape,
    Tensor as Tensor,
    TupleShape as TupleShape,
    active_scribe as active_scribe,
    dtype_named as dtype_named,
)
