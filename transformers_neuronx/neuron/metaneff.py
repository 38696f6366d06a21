"""What the Neuron runtime needs in addition to a NEFF: a module's inputs and outputs, in the module's own order."""

from __future__ import annotations

from transformers_neuronx.errors import EngineError
from transformers_neuronx.hlo.control import weights_of
from transformers_neuronx.neuron.metaneff_pb2 import MetaNeff, MetaTensor
from transformers_neuronx.pyhlo import HloModuleProto, hlo_pb2
from transformers_neuronx.pyhlo.hlo_pb2 import ShapeProto

# The runtime has fewer types. It only stores and copies, so any type with the same number of bits works: 8-bit floats
# are INT8, as in the original library, although the runtime has names for them.
TYPES = {
    hlo_pb2.PRED: MetaTensor.UINT8,
    hlo_pb2.S8: MetaTensor.INT8,
    hlo_pb2.S16: MetaTensor.INT16,
    hlo_pb2.S32: MetaTensor.INT32,
    hlo_pb2.S64: MetaTensor.INT64,
    hlo_pb2.U8: MetaTensor.UINT8,
    hlo_pb2.U16: MetaTensor.UINT16,
    hlo_pb2.U32: MetaTensor.INT32,
    hlo_pb2.U64: MetaTensor.INT64,
    hlo_pb2.F16: MetaTensor.FLOAT16,
    hlo_pb2.F32: MetaTensor.FLOAT,
    hlo_pb2.F64: MetaTensor.DOUBLE,
    hlo_pb2.BF16: MetaTensor.BFLOAT16,
    hlo_pb2.F8E4M3FN: MetaTensor.INT8,
    hlo_pb2.F8E5M2: MetaTensor.INT8,
}


def metaneff_of(module: HloModuleProto) -> MetaNeff:
    """Return the description of a module. Raises EngineError if Neuron lacks the type of an input or output.

    A parameter whose memory an output takes is a state. Of the others, those that were declared as weights are weights.
    """
    signature = module.host_program_shape
    results = signature.result.tuple_shapes if signature.result.element_type == hlo_pb2.TUPLE else [signature.result]
    aliases = {(*entry.output_shape_index, 0)[0]: entry.parameter_number for entry in module.input_output_alias.entries}
    kinds = dict.fromkeys(weights_of(module), MetaTensor.INPUT_WEIGHT)
    kinds |= dict.fromkeys(aliases.values(), MetaTensor.INPUT_STATE)
    meta = MetaNeff(output_aliases_to=aliases)
    for number, shape in enumerate(signature.parameters):
        tensor = _tensor(module, f"input{number}", shape)
        tensor.type = kinds.get(number, MetaTensor.USER_INPUT)
        meta.input_tensors.append(tensor)
    meta.output_tensors.extend(_tensor(module, f"output{number}", shape) for number, shape in enumerate(results))
    types = [tensor.type for tensor in meta.input_tensors]
    meta.num_user_inputs = types.count(MetaTensor.USER_INPUT)
    meta.num_states = types.count(MetaTensor.INPUT_STATE)
    meta.num_weights = types.count(MetaTensor.INPUT_WEIGHT)
    return meta


def _tensor(module: HloModuleProto, name: str, shape: ShapeProto) -> MetaTensor:
    if shape.element_type not in TYPES:
        kind = hlo_pb2.PrimitiveType.Name(shape.element_type).lower()
        raise EngineError(f"{module.name}: {name} is {kind}, but Neuron has no inputs or outputs of that type")
    return MetaTensor(name=name.encode(), shape=shape.dimensions, data_type=TYPES[shape.element_type])
