"""The wire format: generated code is current, and XLA reads every field as it was meant."""

import importlib
import mmap
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

from transformers_neuronx import hlo
from transformers_neuronx.compiler import compile_py_func
from transformers_neuronx.neuron import metaneff_pb2
from transformers_neuronx.pyhlo import dtype_named, hlo_pb2
from transformers_neuronx.pyhlo.opcodes import OPCODES

ROOT = Path(__file__).parents[2]
PROTOS = ("transformers_neuronx/pyhlo/hlo.proto", "transformers_neuronx/neuron/metaneff.proto")
GENERATOR = "1.75.1"  # of grpcio-tools; other versions generate other code
F32, S32 = dtype_named("f32"), dtype_named("s32")


@pytest.fixture(scope="module")
def jaxlib_hlo():
    pytest.importorskip("jaxlib", reason="XLA's own reader comes with jaxlib")
    return importlib.import_module("jaxlib._hlo")


@pytest.mark.parametrize("proto", PROTOS)
def test_the_generated_code_is_what_make_proto_writes(tmp_path, proto):
    pytest.importorskip("grpc_tools", reason="it is regenerated with grpcio-tools")
    if (version := metadata.version("grpcio-tools")) != GENERATOR:
        pytest.skip(f"grpcio-tools {version} is not the {GENERATOR} that `make proto` needs")
    out = [f"--python_out={tmp_path}", f"--pyi_out={tmp_path}"]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", "-I.", *out, proto], cwd=ROOT, check=True)
    for ending in ("py", "pyi"):
        path = Path(proto).with_name(f"{Path(proto).stem}_pb2.{ending}")
        assert (tmp_path / path).read_bytes() == (ROOT / path).read_bytes(), f"run `make proto`: {path} is not current"


def test_the_schema_lives_under_a_name_that_no_other_library_registers():
    assert hlo_pb2.DESCRIPTOR.package == "transformers_neuronx.pyhlo"
    assert metaneff_pb2.DESCRIPTOR.package == "transformers_neuronx.neuron"


def _described(data, name):
    """Return the FileDescriptorProto `name` from the data section of C++ code that protoc generated."""
    at = end = data.find(b"\x0a" + bytes([len(name)]) + name.encode())

    def varint():
        nonlocal end
        value = shift = 0
        while True:
            byte = data[end]
            value, shift, end = value | (byte & 127) << shift, shift + 7, end + 1
            if byte < 128:
                return value

    while True:
        tag, start = data[end], end
        if tag >> 3 not in range(1, 13) or tag & 7 not in (0, 2):
            return descriptor_pb2.FileDescriptorProto.FromString(bytes(data[at:start]))
        end += 1
        size = varint()
        end += size if tag & 7 == 2 else 0
        if tag >> 3 == 12:  # the syntax comes last
            return descriptor_pb2.FileDescriptorProto.FromString(bytes(data[at:end]))


def _flat(prefix, messages, enums):
    """Map (message or enum, field) to everything that decides how the field's bytes are read."""
    table = {(prefix + enum.name, value.name): value.number for enum in enums for value in enum.value}
    for message in messages:
        name = prefix + message.name
        for field in message.field:
            table[name, field.name] = (field.number, field.label, field.type, field.type_name.rpartition(".")[2])
        table |= _flat(f"{name}.", message.nested_type, message.enum_type)
    return table


def test_every_field_has_the_name_number_and_type_that_xla_declares():
    jaxlib = pytest.importorskip("jaxlib", reason="jaxlib carries XLA's own schema")
    theirs = {}
    with (
        (Path(jaxlib.__file__).parent / "libjax_common.so").open("rb") as library,
        mmap.mmap(library.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        for name in ("xla/service/hlo.proto", "xla/xla_data.proto"):
            file = _described(data, name)
            theirs |= _flat("", file.message_type, file.enum_type)
    own = descriptor_pb2.FileDescriptorProto.FromString(hlo_pb2.DESCRIPTOR.serialized_pb)
    ours = _flat("", own.message_type, own.enum_type)
    assert len(ours) > 150
    assert ours == {field: theirs.get(field) for field in ours}


def test_every_opcode_is_one_that_xla_knows(jaxlib_hlo):
    # XLA's enumeration has C++ names; the wire format has these for those that are not their hyphenated form.
    special = {
        "kClz": "count-leading-zeros",
        "kCos": "cosine",
        "kExp": "exponential",
        "kExpm1": "exponential-minus-one",
        "kLog1p": "log-plus-one",
        "kOptimizationBarrier": "opt-barrier",
        "kPopulationCount": "popcnt",
        "kSin": "sine",
        "kTopK": "topk",
    }
    names = [name for name in dir(jaxlib_hlo.HloOpcode) if re.match("k[A-Z]", name)]
    known = {special.get(name, re.sub("(?<!^)(?=[A-Z])", "-", name[1:]).lower()) for name in names}
    assert set(OPCODES.values()) <= known


def _everything(scribe):
    x = F32[4, 3].Parameter(parameter_number=0, name="x")
    i = S32[2].Parameter(parameter_number=1, name="i")
    y = hlo.composite("twice", lambda x, by: x * by)(hlo.take(x, i), by=2.0)
    z = x + 1.0
    z.set_alias_to(x, must=True)
    return y, z, hlo.sort(hlo.sum(x, 1))[1]


TEXT = [
    r"HloModule _everything, input_output_alias={ {1}: (0, {}, must-alias) }",
    r"entry_computation_layout={(f32[4,3]{1,0}, s32[2]{0})->(f32[2,3]{1,0}, f32[4,3]{1,0}, s32[4]{0})}",
    r"%x.1 = f32[4,3]{1,0} parameter(0)",
    r"%gather.3 = f32[2,3]{1,0} gather(%x.1, %i.2), offset_dims={1}, collapsed_slice_dims={0}, start_index_map={0}, "
    r"index_vector_dim=1, slice_sizes={1,3}",
    r'frontend_attributes={composite.attributes={"by": 2.0},composite.name="twice",composite.operands="x"}',
    r"dimensions={0}, is_stable=true, to_apply=%sort.to_apply",
    r'metadata={op_type="Gather" op_name="gather" source_file="',
]


@pytest.mark.parametrize("text", TEXT)
def test_xla_reads_what_was_written(jaxlib_hlo, text):
    read = jaxlib_hlo.HloModule.from_serialized_hlo_module_proto(compile_py_func(_everything).SerializeToString())
    assert text in read.to_string()
