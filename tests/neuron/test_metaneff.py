"""The description of a module for the Neuron runtime, read with a wire format that is written out here."""

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from transformers_neuronx import hlo
from transformers_neuronx.compiler import compile_py_func
from transformers_neuronx.errors import EngineError
from transformers_neuronx.neuron.metaneff import metaneff_of
from transformers_neuronx.pyhlo import dtype_named

F32, BF16, S32 = dtype_named("f32"), dtype_named("bf16"), dtype_named("s32")
UNDEFINED, USER_INPUT, INPUT_STATE, INPUT_WEIGHT = range(4)

# (number, name, type, whether it is repeated); enumerations are plain numbers.
FIELDS = {
    "MetaTensor": [
        (1, "name", "bytes", False),
        (2, "shape", "int64", True),
        (3, "data_type", "int32", False),
        (4, "content", "bytes", False),
        (5, "allow_dynamic_batch_size", "bool", False),
        (6, "checkpoint_key", "bytes", False),
        (7, "type", "int32", False),
        (8, "user_input_key", "bytes", False),
    ],
    "ModelConfig": [
        (1, "num_infer", "int64", False),
        (2, "timeout", "int64", False),
        (3, "optimal_ncg_size", "int64", False),
        (4, "async_load", "bool", False),
        (5, "lazy_load", "bool", False),
        (6, "return_aliases", "bool", False),
    ],
    "Pair": [(1, "key", "int64", False), (2, "value", "int64", False)],
    "MetaNeff": [
        (1, "input_tensors", "MetaTensor", True),
        (2, "output_tensors", "MetaTensor", True),
        (3, "model_config", "ModelConfig", False),
        (4, "serialized_graph_def", "bytes", False),
        (5, "name", "bytes", False),
        (6, "output_aliases_to", "Pair", True),
        (7, "num_user_inputs", "int64", False),
        (8, "num_states", "int64", False),
        (9, "num_weights", "int64", False),
    ],
}


@pytest.fixture(scope="module")
def theirs():
    """The MetaNeff of `FIELDS`, under the package name that torch-neuronx has, in a pool of its own."""
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="metaneff.proto", package="metaneff", syntax="proto3")
    for message, fields in FIELDS.items():
        described = file.message_type.add(name=message)
        for number, name, kind, repeated in fields:
            field = described.field.add(name=name, number=number)
            field.label = kinds.LABEL_REPEATED if repeated else kinds.LABEL_OPTIONAL
            if kind in FIELDS:
                field.type, field.type_name = kinds.TYPE_MESSAGE, f".metaneff.{kind}"
            else:
                field.type = getattr(kinds, f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("metaneff.MetaNeff"))


def step(_):
    """Two inputs, two caches whose memory the second and third output take, two weights."""
    parameters = hlo.Parameters()
    token, position = parameters.add(S32[2, 1], "token"), parameters.add(S32[2], "position")
    keys, values = (parameters.add(BF16[4, 8], name) for name in ("keys", "values"))
    weight, bias = parameters.add(F32[2, 3], "weight", weight=True), parameters.add(F32[3], "bias", weight=True)
    # Crosswise, so that an output's number is not its state's number minus a constant.
    new_values, new_keys = values + 1.0, keys + 1.0
    new_values.set_alias_to(values, must=True)
    new_keys.set_alias_to(keys)
    rows = hlo.convert(hlo.reshape(token, 2) + position, "f32")
    return hlo.dot(rows, weight, contract=([0], [0])) + bias, new_values, new_keys


INPUTS = [
    # name, sizes, data_type, type
    (b"input0", [2, 1], 2, USER_INPUT),
    (b"input1", [2], 2, USER_INPUT),
    (b"input2", [4, 8], 14, INPUT_STATE),
    (b"input3", [4, 8], 14, INPUT_STATE),
    (b"input4", [2, 3], 1, INPUT_WEIGHT),
    (b"input5", [3], 1, INPUT_WEIGHT),
]
OUTPUTS = [(b"output0", [3], 1, 0), (b"output1", [4, 8], 14, 0), (b"output2", [4, 8], 14, 0)]


def listed(tensors):
    return [(tensor.name, list(tensor.shape), tensor.data_type, tensor.type) for tensor in tensors]


def test_inputs_outputs_and_aliases_as_another_reads_them(theirs):
    read = theirs.FromString(metaneff_of(compile_py_func(step)).SerializeToString())
    assert listed(read.input_tensors) == INPUTS
    assert listed(read.output_tensors) == OUTPUTS
    assert {pair.key: pair.value for pair in read.output_aliases_to} == {1: 3, 2: 2}
    assert (read.num_user_inputs, read.num_states, read.num_weights) == (2, 2, 2)
    said = {field.name for field, _ in read.ListFields()}
    assert said == {"input_tensors", "output_tensors", "output_aliases_to"} | {
        *("num_user_inputs", "num_states", "num_weights")
    }


def test_every_field_has_its_number_and_name(theirs):
    meta = metaneff_of(compile_py_func(step))
    repeated_label = descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED
    for message in descriptor_pb2.FileDescriptorProto.FromString(meta.DESCRIPTOR.file.serialized_pb).message_type:
        ours = [(field.number, field.name, field.label == repeated_label) for field in message.field]
        assert ours == [(number, name, repeated) for number, name, _, repeated in FIELDS[message.name]]
    # All types, in both directions.
    meta.model_config.num_infer, meta.model_config.timeout, meta.model_config.optimal_ncg_size = 1, 2, 3
    meta.model_config.async_load = meta.model_config.lazy_load = meta.model_config.return_aliases = True
    meta.serialized_graph_def, meta.name = b"graph", b"name"
    first = meta.input_tensors[0]
    first.content, first.allow_dynamic_batch_size = b"content", True
    first.checkpoint_key, first.user_input_key = b"", b"key"
    data = meta.SerializeToString(deterministic=True)
    read = theirs.FromString(data)
    assert (read.serialized_graph_def, read.name, read.model_config.timeout) == (b"graph", b"name", 2)
    assert read.model_config.async_load and read.model_config.lazy_load and read.model_config.return_aliases
    assert read.input_tensors[0].content == b"content" and read.input_tensors[0].user_input_key == b"key"
    assert type(meta).FromString(read.SerializeToString()).input_tensors[1:] == meta.input_tensors[1:]


def test_the_bytes():
    def negated(_):
        return -F32[3].Parameter(parameter_number=0)

    tensor = b"\x12\x01\x03\x18\x01"  # shape [3], FLOAT
    given = b"\x0a\x06input0" + tensor + b"\x38\x01"  # USER_INPUT
    got = b"\x0a\x07output0" + tensor
    expected = b"\x0a" + bytes([len(given)]) + given + b"\x12" + bytes([len(got)]) + got + b"\x38\x01"
    assert metaneff_of(compile_py_func(negated)).SerializeToString() == expected


def test_a_result_that_is_no_tuple_can_take_the_memory_of_a_state(theirs):
    def counter(_):
        old = S32[()].Parameter(parameter_number=0)
        new = old + 1
        new.set_alias_to(old)
        return new

    read = theirs.FromString(metaneff_of(compile_py_func(counter)).SerializeToString())
    assert listed(read.input_tensors) == [(b"input0", [], 2, INPUT_STATE)]
    assert listed(read.output_tensors) == [(b"output0", [], 2, UNDEFINED)]
    assert [(pair.key, pair.value) for pair in read.output_aliases_to] == [(0, 0)]


def test_what_is_no_state_and_no_weight_is_the_user_s():
    def added(_):
        return F32[3].Parameter(parameter_number=0) + F32[3].Parameter(parameter_number=1)

    meta = metaneff_of(compile_py_func(added))
    assert [tensor.type for tensor in meta.input_tensors] == [USER_INPUT] * 2 and meta.num_user_inputs == 2


def test_a_weight_may_stand_between_states():
    def updated(_):
        parameters = hlo.Parameters()
        given, first, weight, second = (parameters.add(F32[3], str(n), weight=n == 2) for n in range(4))
        outputs = first + given, second * weight
        for output, state in zip(outputs, (first, second), strict=True):
            output.set_alias_to(state)
        return outputs

    meta = metaneff_of(compile_py_func(updated))
    assert [tensor.type for tensor in meta.input_tensors] == [USER_INPUT, INPUT_STATE, INPUT_WEIGHT, INPUT_STATE]


TYPES = dict(
    pred=6, s8=7, s16=9, s32=2, s64=10, u8=6, u16=8, u32=2, u64=10, f16=12, f32=1, f64=13, bf16=14, f8e4m3fn=7, f8e5m2=7
)  # fmt: skip


def passed_on(dtype):
    return compile_py_func(lambda _: hlo.reshape(dtype_named(dtype)[4].Parameter(parameter_number=0), 2, 2))


@pytest.mark.parametrize("dtype", TYPES)
def test_types(dtype):
    meta = metaneff_of(passed_on(dtype))
    assert [tensor.data_type for tensor in (*meta.input_tensors, *meta.output_tensors)] == [TYPES[dtype]] * 2


@pytest.mark.parametrize("dtype", ["s4", "u4", "c64", "c128"])
def test_types_that_neuron_has_not(dtype):
    module = passed_on(dtype)
    module.name = "wide"
    with pytest.raises(EngineError, match=f"^wide: input0 is {dtype}, but Neuron has no inputs or outputs of that"):
        metaneff_of(module)


def test_a_type_of_an_output_that_neuron_has_not():
    module = passed_on("f32")
    module.host_program_shape.result.element_type = 15
    with pytest.raises(EngineError, match=": output0 is c64, but"):
        metaneff_of(module)
