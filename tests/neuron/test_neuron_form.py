"""The form of a module for Neuron: it computes the same with other operations."""

import numpy as np
import pytest
from standin_device import without_custom_calls

from transformers_neuronx import hlo
from transformers_neuronx.compiler import compile_py_func
from transformers_neuronx.layers.activation import gelu, gelu_tanh, silu, softmax
from transformers_neuronx.layers.norm import _rms_norm
from transformers_neuronx.neuron.form import neuron_form
from transformers_neuronx.pyhlo import HloModuleProto, dtype_named
from transformers_neuronx.runtimes import get_runtime

NUMBERS = np.random.default_rng(0)
X = NUMBERS.standard_normal((3, 4, 5)).astype(np.float32)
SPECIAL = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-30, -1e-7, 3e38, 0.5, 1.5, 2.5, -2.5, -0.5, 7], np.float32)


def opcodes(module):
    return {instruction.opcode for computation in module.computations for instruction in computation.instructions}


def targets(module):
    return [i.custom_call_target for c in module.computations for i in c.instructions if i.opcode == "custom-call"]


def computed(module, *arrays):
    runtime = get_runtime("cpu", 1)
    return [each.numpy() for each in runtime.compile(without_custom_calls(module))(*(runtime.put([a]) for a in arrays))]


@pytest.fixture
def form(write):
    """`form(function, *arrays)`: the form of its module, checked to compute the same as the module."""

    def formed(function, *arrays, close=0.0):
        module = write(function, *arrays)
        before = module.SerializeToString(deterministic=True)
        new = neuron_form(module)
        assert module.SerializeToString(deterministic=True) == before
        assert new.host_program_shape == module.host_program_shape
        for got, want in zip(computed(new, *arrays), computed(module, *arrays), strict=True):
            assert got.dtype == want.dtype
            np.testing.assert_allclose(got, want, rtol=close, atol=0)
        return new

    return formed


@pytest.mark.parametrize("start", [(0, 1, 0), (2, 2, 4), (-7, 1, 3), (100, 100, 100)])
@pytest.mark.parametrize("sizes", [(1, 2, 5), (3, 4, 1), (2, 2, 2), (3, 4, 5)])
def test_slices_that_move(form, start, sizes):
    starts = [np.array(each, np.int32) for each in start]
    new = form(lambda x, *at: hlo.dynamic_slice(x, at, sizes), X, *starts)
    assert "dynamic-slice" not in opcodes(new)
    block = NUMBERS.standard_normal(sizes).astype(np.float32)
    new = form(lambda x, y, *at: hlo.dynamic_update_slice(x, y, at), X, block, *starts)
    assert "dynamic-update-slice" not in opcodes(new)


@pytest.mark.parametrize("dtype", [bool, np.int8])
def test_slices_of_other_numbers(form, dtype):
    x, y, at = (X > 0).astype(dtype), np.ones((1, 1, 1), dtype), np.array(1, np.int32)
    form(lambda x, y, at: hlo.dynamic_update_slice(x, y, [at, at, at]), x, y, at)


@pytest.mark.parametrize(
    ("function", "gone", "close"),
    [
        (hlo.is_finite, "is-finite", 0),
        (hlo.round, "round-nearest-even", 0),
        (lambda x: hlo.log1p(hlo.abs(x)), "log-plus-one", 3e-7),
        (lambda x: hlo.any(x > 0.0, 0), "", 0),
        (lambda x: hlo.all(x > 0.0, 0), "", 0),
    ],
)
@pytest.mark.parametrize("x", [SPECIAL, X, np.array([1e-9, 2.0**-24, -0.9999], np.float32)])
def test_other_operations_say_the_same(form, function, gone, close, x):
    new = form(function, x, close=close)
    assert gone not in opcodes(new)
    combined = {c.instructions[-1].opcode for c in new.computations if c.id != new.entry_computation_id}
    assert combined <= {"minimum", "maximum"}


def test_numbers_of_eight_bits_are_shifted_as_others(form):
    new = form(lambda x: hlo.shift_right(x, 3), np.arange(-128, 128).astype(np.int8))
    [shift] = [i for c in new.computations for i in c.instructions if i.opcode == "shift-right-arithmetic"]
    assert shift.shape.element_type == dtype_named("s32").element.number


@pytest.mark.parametrize(
    ("function", "target"),
    [
        (hlo.erf, "AwsNeuronErf"),
        (gelu, "AwsNeuronGelu"),
        (gelu_tanh, "AwsNeuronGeluApprxTanh"),
        (silu, "AwsNeuronSilu"),
        (softmax, "AwsNeuronSoftmax"),
        (lambda x: _rms_norm(x, hlo.full(2.0, "f32", x.sizes[-1:]), eps=1e-5), "AwsNeuronRmsNorm"),
        (lambda x: hlo.top_k(x, 3), "AwsNeuronTopK"),
    ],
)
def test_the_compiler_s_own_operations(form, function, target):
    assert targets(form(function, X, close=1e-6)) == [target]


def test_a_composite_of_other_operands_keeps_its_body(form):
    other = hlo.composite("softmax", lambda scores, *, by: scores * by)
    assert targets(form(lambda x: other(x, by=2.0), X)) == []


def test_control_flow_is_written_out(form):
    def function(x, y):
        doubled = hlo.conditional(hlo.all(x > 0.0, [0, 1, 2]), lambda: x * 2.0, lambda: x + y)
        [count, z] = hlo.while_loop(
            lambda n, _: n < 3, lambda n, z: [n + 1, z * 0.5 + doubled], [hlo.constant(0, "s32"), y], rounds=3
        )
        return z, count, *hlo.optimization_barrier(doubled)

    for x in (X, np.abs(X) + 1):
        new = form(function, x, X + 1)
        assert not {"while", "conditional", "call", "opt-barrier", "get-tuple-element"} & opcodes(new)


def test_loops_of_unknown_length_stay(form):
    def function(x):
        return hlo.while_loop(lambda x: hlo.any(x < 9.0, 0), lambda x: [x + hlo.erf(x) + 1.0], [x])

    assert "while" in opcodes(form(function, np.arange(3, dtype=np.float32)))


def test_what_has_no_use_is_left_out_but_for_parameters(form):
    def function(x, y):
        hlo.sum(hlo.exp(y), 0)
        return x + 1.0

    new = form(function, X, X)
    assert len(new.computations) == 1 and "exponential" not in opcodes(new)
    assert len(new.host_program_shape.parameters) == 2


def test_lines_and_scopes_are_those_of_the_graph():
    def function(scribe):
        x = dtype_named("f32")[4].Parameter(parameter_number=0)
        with scribe.scope("layer.7"):
            return hlo.is_finite(x)

    module = compile_py_func(function)
    want = module.computations[-1].instructions[-1].metadata
    got = [each.metadata for each in neuron_form(module).computations[-1].instructions[1:]]
    assert len(got) > 2 and all(each == want for each in got)
    assert want.source_file == __file__ and want.op_name.startswith("layer.7/")


def test_weights_come_through_a_static_ring_and_aliases_stay():
    def function(_):
        parameters = hlo.Parameters()
        shape = dtype_named("f32")[4]
        x, cache = parameters.add(shape, "x"), parameters.add(shape, "cache")
        weight = parameters.add(shape, "weight", weight=True)
        new = cache + x
        new.set_alias_to(cache, must=True)
        return [x * weight, new]

    module = compile_py_func(function)
    new = neuron_form(module)
    assert targets(new) == ["AwsNeuronTransferWithStaticRing"]
    assert new.input_output_alias == module.input_output_alias and new.name == module.name
    x = np.arange(4, dtype=np.float32)
    assert [each.tolist() for each in computed(new, x, x, x)] == [(x * x).tolist(), (2 * x).tolist()]


def test_ids_are_small_and_in_order():
    module = compile_py_func(lambda _: hlo.exp(dtype_named("f32")[2].Parameter(parameter_number=0)))
    big = HloModuleProto.FromString(module.SerializeToString())
    [computation] = big.computations
    computation.id = big.entry_computation_id = 2**40
    for instruction in computation.instructions:
        instruction.id += 2**40
        instruction.operand_ids[:] = [number + 2**40 for number in instruction.operand_ids]
    computation.root_id += 2**40
    assert [i.id for i in neuron_form(big).computations[0].instructions] == [1, 2]
