"""PyHLO: what `dtype[sizes].Op(...)` writes, and what it refuses, without an engine."""

import copy
import inspect
import pickle
import threading

import numpy as np
import pytest

from transformers_neuronx import hlo
from transformers_neuronx.compiler import compile_py_func
from transformers_neuronx.errors import GraphError
from transformers_neuronx.pyhlo import HloScribe, active_scribe, dtype_named, hlo_pb2
from transformers_neuronx.pyhlo.opcodes import OPCODES

F32, S32, PRED = dtype_named("f32"), dtype_named("s32"), dtype_named("pred")


def line_of(function):
    """Return the line where `function` starts."""
    return inspect.getsourcelines(function)[1]


def parameter(number=0, *sizes, dtype=F32):
    return dtype[sizes].Parameter(parameter_number=number)


def instructions(function):
    """Return the instructions of the entry computation of `function`, which is written last."""
    return compile_py_func(function).computations[-1].instructions


def last(function):
    return instructions(function)[-1]


# Names, ids and shapes.


def test_a_module_has_the_name_of_its_function():
    def lm_head(scribe):
        return parameter()

    module = compile_py_func(lm_head)
    assert module.name == "lm_head"
    assert module.computations[-1].id == module.entry_computation_id
    assert module.host_program_shape == module.computations[-1].program_shape


def test_a_callable_object_names_its_module_after_its_class():
    class Head:
        def __call__(self, scribe):
            return parameter()

    assert compile_py_func(Head()).name == "Head"


def test_ids_and_names_are_unique_over_all_computations():
    def function(scribe):
        x = parameter(0, 4)
        return hlo.sum(x, 0) + hlo.max(x, 0)

    module = compile_py_func(function)
    written = [i for computation in module.computations for i in computation.instructions]
    everything = [*written, *module.computations]
    assert len({one.id for one in everything}) == len(everything) > 8
    assert len({one.name for one in written}) == len(written)
    for computation in module.computations:
        inside = {i.id for i in computation.instructions}
        assert computation.root_id in inside
        assert all(operand in inside for i in computation.instructions for operand in i.operand_ids)


def test_a_name_of_ones_own_is_numbered():
    (x,) = instructions(lambda scribe: F32[2].Parameter(parameter_number=0, name="hidden"))
    assert (x.name, x.opcode, x.metadata.op_name) == (f"hidden.{x.id}", "parameter", "hidden")


def test_a_tensor_says_what_it_is():
    def function(scribe):
        x = scribe.bf16[2, 3].Parameter(parameter_number=0)
        assert (x.sizes, x.dtype, x.dtype.name, x.scribe) == ((2, 3), dtype_named("bf16"), "bf16", scribe)
        assert x.shape_proto.element_type == hlo_pb2.BF16
        assert list(x.shape_proto.dimensions) == [2, 3]
        assert list(x.shape_proto.layout.minor_to_major) == [1, 0]
        assert repr(x) == "parameter.1:bf16[2,3]"
        return x

    compile_py_func(function)


def test_scalars_come_from_a_dtype_and_one_axis_needs_no_tuple():
    def function(scribe):
        assert scribe.f32.Iota is not None
        assert scribe.f32.Parameter(parameter_number=0).sizes == ()
        assert scribe.f32[7].Parameter(parameter_number=1).sizes == (7,)
        assert scribe.f32[np.int64(3),].Parameter(parameter_number=2).sizes == (3,)
        return scribe.f32[[2, 0]].Parameter(parameter_number=3)

    assert list(last(function).shape.dimensions) == [2, 0]


def test_element_types_are_the_same_objects_however_they_are_asked_for():
    scribe = HloScribe("serialize_torch")  # the original needs an argument
    assert scribe.get_dtype("s8") is scribe.s8 is dtype_named("s8")
    assert pickle.loads(pickle.dumps(F32)) is F32 is copy.deepcopy(F32)


def test_several_outputs_become_a_tuple_of_tuples_where_asked():
    def function(scribe):
        x = parameter(0, 2)
        pair = scribe.tuple(x.shape, x.shape).Tuple(x, x)
        with pytest.raises(GraphError, match=r"tuple\.2:\(f32\[2\], f32\[2\]\) is a tuple: take one of its elements"):
            _ = pair.sizes
        return x, pair

    shape = last(function).shape
    assert shape.element_type == hlo_pb2.TUPLE
    assert [inner.element_type for inner in shape.tuple_shapes] == [hlo_pb2.F32, hlo_pb2.TUPLE]


def test_to_apply_writes_a_computation_or_takes_the_id_of_one():
    def add(scribe):
        return F32.Add(parameter(0), parameter(1))

    def function(scribe):
        x, zero = parameter(0, 4), F32.Constant(constant_value=0)
        number, shape = scribe.computation(add, "add")
        assert repr(shape) == "f32[]"
        return F32.Reduce(x, zero, dimensions=[0], to_apply=add), F32.Reduce(x, zero, dimensions=[0], to_apply=number)

    module = compile_py_func(function)
    by_id = {computation.id: computation for computation in module.computations}
    called = [i.called_computation_ids[0] for i in module.computations[-1].instructions if i.opcode == "reduce"]
    assert [[i.opcode for i in by_id[c].instructions] for c in called] == [["parameter", "parameter", "add"]] * 2
    assert len(by_id) == 3


def test_a_computation_with_a_key_is_written_once():
    module = compile_py_func(lambda scribe: hlo.sum(parameter(0, 4), 0) + hlo.sum(parameter(1, 9), 0))
    assert len(module.computations) == 2


def test_a_while_calls_its_body_first_and_a_conditional_its_branches_in_order():
    def unary(op, dtype=F32):
        return lambda scribe: getattr(dtype, op)(parameter())

    def function(scribe):
        x = F32.While(parameter(), condition=unary("IsFinite", PRED), body=unary("Sqrt"))
        return F32.Conditional(hlo.constant(0, "s32"), x, x, branch_computations=[unary("Sin"), unary("Tan")])

    module = compile_py_func(function)
    root = {computation.id: computation.instructions[-1].opcode for computation in module.computations}
    calls = {i.opcode: [root[c] for c in i.called_computation_ids] for i in module.computations[-1].instructions}
    assert calls["while"] == ["sqrt", "is-finite"]
    assert calls["conditional"] == ["sine", "tan"]


def test_fields_may_be_dicts_text_and_numpy_numbers():
    def function(scribe):
        x = parameter(0, 2)
        low = dict(edge_padding_low=np.int64(1), interior_padding=2)
        padded = F32[5].Pad(x, F32.Constant(constant_value=0), padding_config=dict(dimensions=[low]))
        return F32[5].CustomCall(padded, custom_call_target="mine", backend_config="{a = 1}")

    pad, call = instructions(function)[-2:]
    assert pad.padding_config.dimensions[0].edge_padding_low == 1
    assert (call.custom_call_target, call.backend_config) == ("mine", b"{a = 1}")


@pytest.mark.parametrize("op", OPCODES)
def test_every_operation_of_the_table_is_written_under_its_name(op):
    instruction = last(lambda scribe: getattr(F32[0], op)(**({"constant_value": []} if op == "Constant" else {})))
    assert (instruction.opcode, instruction.metadata.op_type) == (OPCODES[op], op)


# Aliases.


def test_an_alias_names_the_output_the_parameter_and_whether_it_must():
    def function(scribe):
        x, y = parameter(0, 2), parameter(1, 2)
        first, second = x + y, x * y
        second.set_alias_to(y, must=True)
        first.set_alias_to(x)
        return first, second

    entries = compile_py_func(function).input_output_alias.entries
    found = [(list(e.output_shape_index), e.parameter_number, e.kind) for e in entries]
    assert found == [([1], 1, hlo_pb2.MUST_ALIAS), ([0], 0, hlo_pb2.MAY_ALIAS)]


def test_the_only_output_is_aliased_as_a_whole():
    def function(scribe):
        x = parameter(0, 2)
        y = -x
        y.set_alias_to(x)
        return y

    (entry,) = compile_py_func(function).input_output_alias.entries
    assert list(entry.output_shape_index) == []


def test_an_alias_of_something_that_is_no_output_is_refused():
    def function(scribe):
        x = parameter(0, 2)
        (x + 1.0).set_alias_to(x)
        return x * 2.0

    with pytest.raises(GraphError, match=r"set_alias_to needs an output of the module, got add\.4:f32\[2\]"):
        compile_py_func(function)


def test_an_alias_to_something_that_is_no_parameter_is_refused():
    def function(scribe):
        x = parameter(0, 2)
        y = x + 1.0
        y.set_alias_to(y)
        return y

    with pytest.raises(GraphError, match=r"set_alias_to needs a parameter of the module, got add\.4:f32\[2\]"):
        compile_py_func(function)


# Refusals.

REFUSED = {
    "a gap in parameter numbers": (
        lambda scribe: parameter(0) + parameter(2),
        r"<lambda> needs parameter numbers 0, 1, 2, … without gaps or repeats, got \[0, 2\]",
    ),
    "a repeated parameter number": (lambda scribe: parameter(0) + parameter(0), r"repeats, got \[0, 0\]"),
    "a field that is not there": (
        lambda scribe: F32[2].Parameter(parameter_number=0, colour="red"),
        r'f32\[2\]\.Parameter got a field that the wire format does not accept: .*"colour"',
    ),
    "a field of the wrong type": (
        lambda scribe: F32[2].Parameter(parameter_number="first"),
        r"f32\[2\]\.Parameter got a field that the wire format does not accept",
    ),
    "something that is no tensor": (
        lambda scribe: F32.Add(parameter(), 1.0),
        r"Add needs tensors of the graph that is being written, got 1\.0",
    ),
    "an output that is no tensor": (lambda scribe: None, r"<lambda> must return one tensor or several, got None"),
    "negative sizes": (lambda scribe: F32[-1], r"f32\[-1\]: sizes must be integers that are not negative"),
    "sizes that are no integers": (lambda scribe: F32[2, 0.5], r"f32\[2, 0\.5\]: sizes must be integers"),
    "an unknown element type": (
        lambda scribe: scribe.get_dtype("f31"),
        r"unknown element type 'f31'; expected one of pred",
    ),
    "a tuple constant": (
        lambda scribe: scribe.tuple(F32[2]).Constant(constant_value=[1, 2]),
        r"Constant needs one array, got the tuple \(f32\[2\]\): make a Tuple of constants",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_scribe_refuses(case):
    function, message = REFUSED[case]
    with pytest.raises(GraphError, match=message):
        compile_py_func(function)


def test_an_unknown_operation_is_an_attribute_error_with_a_suggestion():
    for shape in (F32[2], F32, HloScribe().tuple(F32[2])):
        with pytest.raises(AttributeError, match=r"has no operation 'Reshpae'; did you mean 'Reshape'\?"):
            _ = shape.Reshpae
    with pytest.raises(AttributeError, match=r"the scribe has no element type 'f31'; expected one of pred, s4"):
        _ = HloScribe().f31


def test_a_tensor_of_another_graph_is_refused():
    kept = []
    compile_py_func(lambda scribe: kept.append(parameter()) or kept[0])
    with pytest.raises(GraphError, match=r"Negate needs tensors of the graph that is being written, got parameter\.1:"):
        compile_py_func(lambda scribe: F32.Negate(kept[0]))


@pytest.mark.parametrize("call", [lambda: parameter(), active_scribe, lambda: hlo.constant(1, "f32")])
def test_outside_of_a_graph_nothing_is_written(call):
    with pytest.raises(GraphError, match="no graph is being written: call this inside a function that compile_py_func"):
        call()


def test_a_graph_that_fails_leaves_no_graph_open():
    with pytest.raises(ZeroDivisionError):
        compile_py_func(lambda scribe: 1 / 0)
    with pytest.raises(GraphError, match="no graph is being written"):
        active_scribe()


def test_a_graph_may_be_written_while_another_one_is():
    def outer(scribe):
        x = parameter(0, 2)
        inner = compile_py_func(lambda scribe: parameter(0, 5))
        assert list(inner.computations[0].instructions[0].shape.dimensions) == [5]
        return x + x

    assert [i.opcode for i in instructions(outer)] == ["parameter", "add"]


def test_threads_write_graphs_of_their_own():
    barrier, modules = threading.Barrier(2, timeout=30), {}

    def write(op):
        def graph(scribe):
            x = parameter(0, 2)
            for _ in range(50):
                barrier.wait()
                x = getattr(F32[2], op)(x, x)
            return x

        modules[op] = compile_py_func(graph)

    threads = [threading.Thread(target=write, args=(op,)) for op in ("Add", "Multiply")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for op, module in modules.items():
        (computation,) = module.computations
        assert [i.opcode for i in computation.instructions] == ["parameter", *[OPCODES[op]] * 50]
        assert [i.id for i in computation.instructions] == list(range(1, 52))


# Source locations of instructions.


def test_metadata_names_the_line_of_the_graph():
    def function(scribe):
        x = scribe.f32[4].Parameter(parameter_number=0)
        return hlo.mean(x + 1.0, 0, keep=True) / 2.0

    written = instructions(function)
    assert len(written) > 8
    assert {i.metadata.source_file for i in written} == {__file__}
    assert written[0].metadata.source_line == line_of(function) + 1
    assert {i.metadata.source_line for i in written[1:]} == {line_of(function) + 2}


def test_a_composite_body_has_lines_of_its_own():
    def body(x):
        return x * x

    module = compile_py_func(lambda scribe: hlo.composite("square", body)(parameter(0, 2)))
    assert module.computations[0].instructions[-1].metadata.source_line == line_of(body) + 1


def test_layers_are_graph_code_too():
    pytest.importorskip("torch", reason="layers name weights, which are loaded with torch")
    from transformers_neuronx.layers import activation

    source = instructions(lambda scribe: activation.relu(parameter(0, 2)))[-1].metadata
    assert source.source_file == activation.__file__
    assert source.source_line == line_of(activation.relu) + 1


def test_scopes_are_prefixes_of_the_names_in_metadata():
    def function(scribe):
        x = parameter(0, 2)
        with scribe.scope("layer.3"), scribe.scope("mlp"):
            y = hlo.sum(-x, 0)
        return y * 1.0

    module = compile_py_func(function)
    names = {i.opcode: i.metadata.op_name for i in module.computations[-1].instructions}
    assert names["negate"] == "layer.3/mlp/negate"
    assert names["multiply"] == "multiply"
    # Names in a nested computation are left to the engine, which puts the caller's before them.
    assert module.computations[0].instructions[-1].metadata.op_name == "add"
