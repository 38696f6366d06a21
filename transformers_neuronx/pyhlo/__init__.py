"""PyHLO: XLA's High Level Operations written from Python."""

from transformers_neuronx.pyhlo.hlo_pb2 import HloModuleProto as HloModuleProto
from transformers_neuronx.pyhlo.scribe import DType as DType
from transformers_neuronx.pyhlo.scribe import HloScribe as HloScribe
from transformers_neuronx.pyhlo.scribe import Shape as Shape
from transformers_neuronx.pyhlo.scribe import Tensor as Tensor
from transformers_neuronx.pyhlo.scribe import active_scribe as active_scribe
from transformers_neuronx.pyhlo.scribe import dtype_named as dtype_named
