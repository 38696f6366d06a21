"""Findings of the linter for Neuron in modules that break a rule, and none in similar ones."""

import pytest
from linting import entry_of, line_of, named, parameter, write

from transformers_neuronx import compiler, hlo
from transformers_neuronx.compiler import Finding, check
from transformers_neuronx.errors import ConfigError, GraphError
from transformers_neuronx.neuron import rules
from transformers_neuronx.neuron.supported import LARGEST, REFUSED, TAKEN, TYPE_REFUSED
from transformers_neuronx.pyhlo import dtype_named, hlo_pb2
from transformers_neuronx.pyhlo.dtypes import ELEMENT_TYPES
from transformers_neuronx.pyhlo.opcodes import OPCODES

F32 = dtype_named("f32")


# Planted faults are found at their lines.


def doubled(x):
    wide = hlo.convert(x, "f64")  # f64
    return hlo.convert(wide + wide, "f32")  # sum


def test_f64():
    [one, two] = check(write(lambda: doubled(parameter(4))))
    assert (one.rule, one.code, one.opcode) == ("element type", "NCC_ESPP004", "convert")
    assert [one.where, two.where] == [line_of(doubled, "# f64"), line_of(doubled, "# sum")]
    assert "f64" in one.message and "f32" in one.advice


def test_an_operation_that_is_not_there():
    def rounded():
        x = parameter(4)
        return hlo.erf(x)  # erf

    [found] = check(write(rounded))
    assert (found.rule, found.opcode, found.where) == ("unsupported operation", "erf", line_of(rounded, "# erf"))
    assert found.instruction == "erf.2" and found.computation.startswith("<lambda>.")
    assert "AwsNeuronErf" in found.advice


def test_an_operation_that_nobody_knows():
    def transformed():
        x = parameter(4)
        return hlo.sin(x)  # fft

    module = write(transformed)
    entry_of(module).instructions[1].opcode = "fft"
    [found] = check(module)
    assert (found.rule, found.opcode, found.where) == ("unknown operation", "fft", line_of(transformed, "# fft"))


@pytest.mark.parametrize("flags", [dict(is_dynamic_dimension=[True]), dict(dimensions=[-1])])
def test_a_dynamic_shape(flags):
    def grown():
        x = parameter(4)
        return hlo.sin(x)  # dynamic

    module = write(grown)
    shape = entry_of(module).instructions[1].shape
    for field, value in flags.items():
        getattr(shape, field)[:] = value
    [found] = check(module)
    assert (found.rule, found.code) == ("dynamic shape", "NCC_EMOD025")
    assert found.where == line_of(grown, "# dynamic")


def looped(x):
    with x.scribe.scope("layer.0"):
        [x] = hlo.while_loop(  # while
            lambda x: hlo.reshape(hlo.slice(x, 0, 0, 1)) < 1.0,
            lambda x: [hlo.erf(x)],  # body
            [x],
        )
    return x


def test_a_loop_and_what_is_in_it():
    [loop, inside] = check(write(lambda: looped(parameter(4))))
    assert (loop.rule, loop.opcode, loop.scope) == ("control flow", "while", "layer.0")
    assert loop.where == line_of(looped, "# while")
    assert (inside.opcode, inside.where) == ("erf", line_of(looped, "# body"))
    assert inside.computation.startswith("body.")
    assert str(loop).startswith(f"test_lint.py:{loop.where.rpartition(':')[2]}: while (layer.0): loops are not")


@pytest.mark.parametrize("number", [2**31, 2**40, -(2**31) - 1])
def test_a_64_bit_id(number):
    def summed():
        x = parameter(4)
        y = hlo.sin(x)  # id
        return hlo.cos(y)  # use

    module = write(summed)
    _, sine, cosine = entry_of(module).instructions
    sine.id = cosine.operand_ids[0] = number
    [one, two] = check(module)
    assert one.rule == two.rule == "64-bit id"
    assert [one.where, two.where] == [line_of(summed, "# id"), line_of(summed, "# use")]


def test_ids_of_computations():
    module = write(lambda: hlo.sum(parameter(4), 0))
    for number in range(2):
        assert check(module) == []
        module.computations[number].id += 2**32
        if number:
            module.entry_computation_id += 2**32
        else:
            entry_of(module).instructions[-1].called_computation_ids[0] += 2**32
        assert {found.rule for found in check(module)} == {"64-bit id"}
        module = write(lambda: hlo.sum(parameter(4), 0))
    entry_of(module).instructions[0].id = entry_of(module).instructions[2].operand_ids[0] = 2**31 - 1
    assert check(module) == []


# Operations.


def test_every_operation_of_pyhlo_has_a_place():
    assert set(OPCODES.values()) <= TAKEN | REFUSED.keys()
    assert not TAKEN & REFUSED.keys()


@pytest.mark.parametrize("opcode", sorted(REFUSED))
def test_what_is_refused_has_advice(opcode):
    module = write(lambda: hlo.sin(parameter(4)))
    entry_of(module).instructions[1].opcode = opcode
    [found] = check(module)
    assert found.opcode == opcode and found.code == "NCC_EVRF001" and len(found.advice) > 10


# Types and sizes.


def test_values_of_a_tuple_are_found_where_they_are_made():
    def several():
        x = hlo.convert(parameter(4), "f64")  # made
        return [hlo.sin(x), hlo.cos(x)]  # sine, cosine

    found = check(write(several))
    assert [each.opcode for each in found] == ["convert", "sine"]
    assert [each.where for each in found] == [line_of(several, "# made"), line_of(several, "# sine")]
    assert found[1].count == 2  # and no tuple


@pytest.mark.parametrize("name", sorted(ELEMENT_TYPES))
def test_types(name):
    found = check(write(lambda: hlo.reshape(parameter(4, dtype=name), 2, 2)))
    assert [each.code for each in found] == ([TYPE_REFUSED[name].code] * 2 if name in TYPE_REFUSED else [])
    assert all(each.message.startswith(f"{name} ") for each in found)


@pytest.mark.parametrize(("number", "name"), [(24, "f8e5m2fnuz"), (25, "f8e4m3fnuz"), (99, "element type 99")])
def test_types_that_pyhlo_does_not_know(number, name):
    module = write(lambda: hlo.sin(parameter(4)))
    entry_of(module).instructions[1].shape.CopyFrom(
        hlo_pb2.ShapeProto.FromString(bytes([0x10, number]) + hlo_pb2.ShapeProto(dimensions=[4]).SerializeToString())
    )
    [found] = check(module)
    assert found.message.startswith(name)


def test_what_is_written_inside_other_computations():
    def in_f64(_):
        a, b = F32.Parameter(parameter_number=0), F32.Parameter(parameter_number=1)
        return hlo.convert(hlo.convert(a, "f64") + hlo.convert(b, "f64"), "f32")  # f64

    def summed():
        return F32.Reduce(parameter(4), hlo.constant(0.0, "f32"), dimensions=[0], to_apply=in_f64)

    module = write(summed)
    reduction, inside = check(module)
    assert (reduction.rule, reduction.computation) == ("reduction", entry_of(module).name)
    assert (inside.rule, inside.where) == ("element type", line_of(in_f64, "# f64"))
    assert inside.computation.startswith("reduce.to_apply.")


@pytest.mark.parametrize(("extra", "wanted"), [(0, []), (1, [("large array", "NCC_EVRF024")])])
def test_arrays_of_more_than_4_gb(extra, wanted):
    assert named(lambda: F32[LARGEST // 4 + extra].Broadcast(hlo.constant(0.0, "f32"))) == wanted


# Results that alias parameters.


def aliased(*pairs):
    """Write the sums of two parameters, f32[4] and f32[8], and 1; each (output, parameter) shares memory."""

    def function():
        parameters = [parameter(4), parameter(8, number=1)]
        results = [each + 1.0 for each in parameters]
        for output, number in pairs:
            results[output].set_alias_to(parameters[number])
        return results

    return function


def test_aliases():
    assert named(aliased((0, 0), (1, 1))) == []
    for pairs, wanted in (
        ([(0, 0), (0, 0)], ["several parameters", "several results"]),
        ([(0, 0), (0, 1)], ["several parameters", "f32[4] in the memory of parameter 1, which is f32[8]"]),
        ([(0, 0), (1, 0)], ["memory to several results", "f32[8] in the memory of parameter 0, which is f32[4]"]),
    ):
        found = check(write(aliased(*pairs)))
        assert all(each.rule == "aliasing" and each.where.startswith(__file__) for each in found)
        assert len(found) == len(wanted)
        assert all(text in each.message for text, each in zip(wanted, found, strict=True))


@pytest.mark.parametrize(
    "entry", [dict(parameter_number=7), dict(output_shape_index=[-9]), dict(output_shape_index=[2])]
)
def test_aliases_of_what_there_is_not(entry):
    module = write(aliased())
    module.input_output_alias.entries.add(**dict(output_shape_index=[0], parameter_number=0) | entry)
    [found] = check(module)
    assert found.rule == "aliasing" and "no array" in found.message


def test_a_parameter_as_a_result():
    def returned():
        x = F32[4].Parameter(parameter_number=0)  # given
        return [x, x + 1.0]

    [found] = check(write(returned))
    assert (found.rule, found.opcode, found.where) == ("aliasing", "parameter", line_of(returned, "# given"))
    assert named(lambda: F32[4].Copy(parameter(4))) == []


# Output of findings.


def test_once_for_a_line():
    def of_layers():
        x = parameter(4)
        for layer in range(3):
            with x.scribe.scope(f"layer.{layer}"):
                x = hlo.erf(x)  # layer
        return hlo.erf(x)

    [layers, last] = check(write(of_layers))
    assert (layers.count, layers.where, layers.scope) == (3, line_of(of_layers, "# layer"), "layer.0")
    assert last.count == 1 and last.where != layers.where
    assert str(layers).endswith(". (3 instructions)") and "instructions" not in str(last)


def test_several_rules_in_a_line():
    def rounded():
        x = hlo.convert(parameter(4), "f64")
        return hlo.is_finite(hlo.erf(hlo.erf(x)))  # all

    found = [each for each in check(write(rounded)) if each.where == line_of(rounded, "# all")]
    assert [(each.rule, each.opcode, each.count) for each in found] == [
        ("unsupported operation", "erf", 2),
        ("element type", "erf", 2),
        ("unsupported operation", "is-finite", 1),
    ]


def test_a_module_that_says_no_lines():
    module = write(lambda: hlo.erf(hlo.erf(parameter(4))))
    for instruction in entry_of(module).instructions:
        instruction.ClearField("metadata")
    [found] = check(module)
    assert (found.where, found.scope, found.count) == ("", "", 2)
    assert (
        str(found) == "erf.2: erf: is not supported [NCC_EVRF001]. Use the custom call AwsNeuronErf. (2 instructions)"
    )


def test_what_is_never_called_is_not_judged():
    module = write(lambda: hlo.composite("unit", hlo.erf)(parameter(4)))
    assert [each.opcode for each in check(module)] == ["call", "erf"]
    call = entry_of(module).instructions[-1]
    call.opcode = "sine"
    del call.called_computation_ids[:]
    assert check(module) == []


def test_a_plain_layer_and_random_bits():
    def layer():
        x, w = parameter(2, 8), parameter(8, 8, number=1)
        y = hlo.dot(x, w, ([1], [0]))
        y = hlo.exp(y - hlo.max(y, 1, keep=True))
        words = [hlo.full(number, "u32", [2, 8]) for number in range(4)]
        noise = hlo.threefry((words[0], words[1]), (words[2], words[3]))[0]
        return [y / hlo.sum(y, 1, keep=True), hlo.logistic(y), noise, hlo.take(w, hlo.argmax(y, 1))]

    module = write(layer)
    before = module.SerializeToString()
    assert check(module) == check(module, "inf2") == check(module, "trn2") == []
    assert module.SerializeToString() == before


def test_what_cannot_be_checked():
    assert compiler.check is rules.check and Finding is rules.Finding
    with pytest.raises(ConfigError, match=r"neuron, trn1, inf2, trn2, got 'trn9'"):
        check(write(lambda: parameter()), "trn9")
    with pytest.raises(GraphError, match="entry computation"):
        check(hlo_pb2.HloModuleProto())
