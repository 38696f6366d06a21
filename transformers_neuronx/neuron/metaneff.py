"""What the Neuron runtime is told of a module besides its NEFF: its inputs and outputs, in the module's own order."""

from __future__ import annotations

from transformers_neuronx.errors import EngineError
from transformers_neuronx.neuron.metaneff_pb2 import MetaNeff, MetaTensor
from transformers_neuronx.pyhlo import HloModuleProto, hlo_pb2
from transformers_neuronx.pyhlo.hlo_pb2 import ShapeProto

# The runtime has fewer types. It only stores and copies, so those of as many bits do: numbers of 8 bits with a point
# are INT8, as the original has it, although there are names for them.
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


def metaneff_of(module: HloModuleProto, user_inputs: int | None = None) -> MetaNeff:
    """The description of a module. Raises EngineError where it has an input or output of a type that Neuron has not.

    A parameter whose memory an output takes is a state. Of the others the first `user_inputs` parameters are the
    user's, and the rest weights. Without that number it is that of the parameters before the first state, as the
    programs here have states after what changes from call to call, and weights after them; without a state all are
    the user's.
    """
    signature = module.host_program_shape
    results = signature.result.tuple_shapes if signature.result.element_type == hlo_pb2.TUPLE else [signature.result]
    aliases = {
        entry.output_shape_index[0] if entry.output_shape_index else 0: entry.parameter_number
        for entry in module.input_output_alias.entries
    }
    states = set(aliases.values())
    if user_inputs is None:
        user_inputs = min(states, default=len(signature.parameters))
    meta = MetaNeff(output_aliases_to=aliases)
    for number, shape in enumerate(signature.parameters):
        tensor = _tensor(module, f"input{number}", shape)
        user = MetaTensor.USER_INPUT if number < user_inputs else MetaTensor.INPUT_WEIGHT
        tensor.type = MetaTensor.INPUT_STATE if number in states else user
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
        raise EngineError(f"{module.name}: {name} is {kind}, and Neuron has no inputs or outputs of that type")
    return MetaTensor(name=name.encode(), shape=shape.dimensions, data_type=TYPES[shape.element_type])
