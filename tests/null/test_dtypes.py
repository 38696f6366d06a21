"""Element types: one table for the wire format, NumPy and PyTorch, and literals made with it."""

import numpy as np
import pytest

from transformers_neuronx.compiler import compile_py_func
from transformers_neuronx.errors import GraphError
from transformers_neuronx.pyhlo import dtype_named, hlo_pb2
from transformers_neuronx.pyhlo.dtypes import (
    ELEMENT_TYPES,
    element_type,
    from_numpy,
    from_torch,
    numpy_to_torch,
    to_torch,
    torch_to_numpy,
)

F32 = dtype_named("f32")
NEEDS_TORCH = "converts to and from PyTorch"
IN_TORCH = [name for name, row in ELEMENT_TYPES.items() if row.torch]


def literal_of(function):
    """Return the literal of the constant that `function` returns."""
    return compile_py_func(function).computations[-1].instructions[-1].literal


def test_every_element_type_has_the_number_and_width_of_the_wire_format():
    for name, row in ELEMENT_TYPES.items():
        assert row.number == hlo_pb2.PrimitiveType.Value(name.upper())
        assert row.bits == (4 if name[1:] == "4" else row.numpy.itemsize * 8)
        assert from_numpy(row.numpy) is element_type(name) is row


@pytest.mark.parametrize("name", IN_TORCH)
def test_values_go_to_torch_and_back_bit_by_bit(name):
    torch = pytest.importorskip("torch", reason=NEEDS_TORCH)
    row = ELEMENT_TYPES[name]
    array = np.array([[1, -2, 0], [3, 5, 7]]).astype(row.numpy)
    tensor = numpy_to_torch(array)
    assert tensor.dtype is to_torch(name)
    assert from_torch(tensor.dtype) is row
    assert torch.equal(tensor.to(torch.complex128), torch.from_numpy(array.astype(np.complex128)))
    back = torch_to_numpy(tensor.T)
    assert back.dtype == row.numpy
    assert back.tobytes() == array.T.tobytes()


def test_a_type_that_the_other_side_lacks_is_refused():
    torch = pytest.importorskip("torch", reason=NEEDS_TORCH)
    with pytest.raises(GraphError, match="PyTorch has no type for s4"):
        to_torch("s4")
    with pytest.raises(GraphError, match=r"no HLO element type holds torch\.qint8"):
        from_torch(torch.qint8)
    with pytest.raises(GraphError, match=r"no HLO element type holds NumPy's datetime64"):
        from_numpy("M8")


def test_an_unknown_name_is_refused_with_those_that_there_are():
    with pytest.raises(GraphError, match=r"unknown element type 'f31'; expected one of pred, s4, .*, c128"):
        dtype_named("f31")


LITERALS = {
    "pred": ("preds", [True, True, False]),
    "s4": ("s4s", bytes([1, 0x0E, 7])),
    "s8": ("s8s", bytes([1, 0xFE, 7])),
    "s16": ("s16s", np.array([1, -2, 7], "<i2").tobytes()),
    "s32": ("s32s", [1, -2, 7]),
    "s64": ("s64s", [1, -2, 7]),
    "u4": ("u4s", bytes([1, 14, 7])),
    "u8": ("u8s", bytes([1, 0xFE, 7])),
    "u16": ("u16s", np.array([1, 65534, 7], "<u2").tobytes()),
    "u32": ("u32s", [1, 2**32 - 2, 7]),
    "u64": ("u64s", [1, 2**64 - 2, 7]),
    "f8e4m3fn": ("f8e4m3fns", bytes([0x38, 0xC0, 0x4E])),
    "f8e5m2": ("f8e5m2s", bytes([0x3C, 0xC0, 0x47])),
    "bf16": ("bf16s", np.array([0x3F80, 0xC000, 0x40E0], "<u2").tobytes()),
    "f16": ("f16s", np.array([0x3C00, 0xC000, 0x4700], "<u2").tobytes()),
    "f32": ("f32s", [1.0, -2.0, 7.0]),
    "f64": ("f64s", [1.0, -2.0, 7.0]),
    "c64": ("c64s", [1.0, 0.0, -2.0, 0.0, 7.0, 0.0]),
    "c128": ("c128s", [1.0, 0.0, -2.0, 0.0, 7.0, 0.0]),
}


@pytest.mark.parametrize("name", ELEMENT_TYPES)
def test_a_literal_has_the_layout_of_its_element_type(name):
    field, stored = LITERALS[name]
    value = np.array([1, -2, 0 if name == "pred" else 7]).astype(ELEMENT_TYPES[name].numpy)
    literal = literal_of(lambda scribe: dtype_named(name)[3].Constant(constant_value=value))
    written = getattr(literal, field)
    assert (written if isinstance(written, bytes) else list(written)) == stored
    assert [f.name for f, _ in literal.ListFields()] == ["shape", field]
    assert literal.shape.element_type == ELEMENT_TYPES[name].number


def test_a_literal_is_row_major_whatever_the_array_is():
    value = np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))
    assert list(literal_of(lambda scribe: F32[2, 3].Constant(constant_value=value)).f32s) == [0, 1, 2, 3, 4, 5]


def test_a_literal_may_be_a_value_a_dict_or_a_message():
    message = literal_of(lambda scribe: F32[2].Constant(constant_value=[1, 2]))
    for given in ([1.0, 2.0], dict(f32s=[1, 2]), message):
        assert literal_of(lambda scribe, given=given: F32[2].Constant(literal=given)) == message


def test_a_value_of_other_sizes_than_declared_is_refused():
    with pytest.raises(GraphError, match=r"Constant needs a value of its declared sizes, f32\[2\], got \[3\]"):
        compile_py_func(lambda scribe: F32[2].Constant(constant_value=[1, 2, 3]))
