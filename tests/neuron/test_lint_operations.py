"""The linter's rules for operations: what breaks each of them, and where sensible what does not."""

import numpy as np
import pytest
from linting import entry_of, named, parameter, write

from transformers_neuronx import hlo
from transformers_neuronx.compiler import check
from transformers_neuronx.neuron.supported import CUSTOM_CALLS
from transformers_neuronx.pyhlo import dtype_named

F32 = dtype_named("f32")


def gathered(**numbers):
    """Gather rows of f32[8, 4] by two indices, with changed dimension numbers."""
    plain = dict(offset_dims=[1], collapsed_slice_dims=[0], start_index_map=[0], index_vector_dim=1)
    sizes = numbers.pop("sizes", [1, 4])
    indices = numbers.pop("indices", lambda: parameter(2, dtype="s32", number=1))
    return lambda: F32[2, *sizes[1:]].Gather(
        parameter(8, 4), indices(), gather_dimension_numbers=plain | numbers, gather_slice_sizes=sizes
    )


def scattered(dtype, op, indices=lambda: parameter(2, 1, dtype="s32", number=1)):
    def function():
        places = indices()
        return hlo.scatter_rows(parameter(8, 4, dtype=dtype), places, hlo.full(1, dtype, [places.sizes[0], 4]), [0], op)

    return function


def batched_scatter():
    made = scattered("f32", None)()
    made.proto.scatter_dimension_numbers.input_batching_dims.append(1)
    return made


def window(**changes):
    made = hlo.reduce_window(parameter(8), "Maximum", -np.inf, [2], [2], [(0, 0)], [1])
    for field, value in changes.items():
        setattr(made.proto.window.dimensions[0], field, value)
    return made


def many_windows():
    made = window()
    made.proto.operand_ids.append(made.proto.operand_ids[1])
    return made


def convolution(stride=1, dilation=1, spread=1):
    return lambda: hlo.convolution(
        parameter(1, 2, 8), parameter(2, 2, 3, number=1), [stride], [(2, 2)], [dilation], [spread]
    )


def powered(exponent, dtype="f32"):
    return lambda: hlo.power(parameter(4, dtype=dtype), exponent() if callable(exponent) else exponent)


def updated(start):
    return lambda: hlo.dynamic_update_slice(parameter(8), parameter(2, number=1), [start()])


def reduced(initial=lambda: hlo.constant(0.0, "f32"), combine=None):
    def addition(_):
        return F32.Add(F32.Parameter(parameter_number=0), F32.Parameter(parameter_number=1))

    return lambda: F32.Reduce(parameter(4), initial(), dimensions=[0], to_apply=combine or addition)


def twice(_):
    a, b = F32.Parameter(parameter_number=0), F32.Parameter(parameter_number=1)
    return F32.Add(F32.Multiply(a, b), b)


def both():
    def combine(_):
        a, b, c, d = (F32.Parameter(parameter_number=number) for number in range(4))
        return [F32.Add(a, c), F32.Add(b, d)]

    x, zero = parameter(4), hlo.constant(0.0, "f32")
    return x.scribe.tuple(F32[()], F32[()]).Reduce(x, x, zero, zero, dimensions=[0], to_apply=combine)


def drawn(distribution):
    low, high = hlo.constant(0.0, "f32"), hlo.constant(1.0, "f32")
    return F32[4].Rng(low, high, distribution=distribution)


def bits(algorithm):
    state = dtype_named("u32")[2].Parameter(parameter_number=0)
    return state.scribe.tuple(state.shape, dtype_named("u32")[4]).RngBitGenerator(state, rng_algorithm=algorithm)


def product(dtype):
    return lambda: hlo.dot(parameter(2, 3, dtype=dtype), parameter(3, 2, dtype=dtype, number=1), ([1], [0]))


def custom(target, *dtypes, config=""):
    operands = lambda: [parameter(8, dtype=dtype, number=number) for number, dtype in enumerate(dtypes)]  # noqa: E731
    return lambda: F32[8].CustomCall(*operands(), custom_call_target=target, backend_config=config)


CASES = {
    "call": (lambda: hlo.composite("twice", lambda x: x + x)(parameter(4)), None, [("control flow", "NCC_EVRF001")]),
    "conditional": (
        lambda: hlo.conditional(parameter(dtype="pred"), lambda: hlo.constant(1.0, "f32"), lambda: parameter(number=1)),
        lambda: hlo.select(parameter(dtype="pred"), parameter(number=1), 0.0),
        [("control flow", "NCC_EVRF001")],
    ),
    "start": (
        updated(lambda: parameter(dtype="s32", number=2)),
        updated(lambda: hlo.constant(3, "s32")),
        [("constant index", "")],
    ),
    "exponent": (powered(lambda: parameter(4, number=1)), powered(2), [("constant exponent", "")]),
    "fraction": (powered(0.5), powered(-3.0), [("constant exponent", "")]),
    "fraction in bf16": (powered(0.5, "bf16"), powered(3, "bf16"), [("constant exponent", "")]),
    "piece": (
        gathered(offset_dims=[1, 2], collapsed_slice_dims=[], sizes=[2, 4]),
        gathered(),
        [("gather", "")],
    ),
    "batching": (
        gathered(operand_batching_dims=[0], start_indices_batching_dims=[0], start_index_map=[]),
        lambda: hlo.gather_rows(parameter(2, 8), parameter(2, 2, dtype="s32", number=1), [0, 1]),
        [("batching dimensions", "")],
    ),
    "beyond": (
        gathered(indices=lambda: hlo.iota("s32", [9])),
        gathered(indices=lambda: hlo.iota("s32", [8])),
        [("index out of bounds", "NCC_EVRF056")],
    ),
    "scatter": (scattered("s32", "Add"), scattered("s32", None), [("scatter", "NCC_EVRF016")]),
    "scatter pred": (scattered("pred", "Or"), scattered("f32", "Add"), [("scatter", "NCC_EVRF016")]),
    "scatter batching": (batched_scatter, scattered("f32", None), [("batching dimensions", "")]),
    "scatter beyond": (
        scattered("f32", None, lambda: hlo.reshape(hlo.iota("s32", [9]), 9, 1)),
        scattered("f32", None, lambda: hlo.reshape(hlo.iota("s32", [2]), 2, 1)),
        [("index out of bounds", "NCC_EVRF031")],
    ),
    "reduce by or": (lambda: hlo.any(parameter(4, dtype="pred"), 0), reduced(), [("reduction", "")]),
    "reduce by more": (reduced(combine=twice), reduced(), [("reduction", "")]),
    "reduce two": (both, lambda: hlo.argmax(parameter(4), 0), [("reduction", "")]),
    "reduce from": (reduced(lambda: parameter(number=1)), reduced(), [("reduction", "")]),
    "base": (lambda: window(base_dilation=2), window, [("window", "NCC_EVRF017")]),
    "window": (lambda: window(window_dilation=2), window, [("window", "NCC_EVRF018")]),
    "windows": (many_windows, window, [("window", "NCC_EVRF019")]),
    "dilations": (
        convolution(dilation=2, spread=2),
        convolution(dilation=2, stride=2),
        [("convolution", "NCC_EVRF010")],
    ),
    "stride": (convolution(stride=2, spread=2), convolution(spread=2), [("convolution", "NCC_EVRF011")]),
    "shift": (
        lambda: hlo.shift_right(parameter(4, dtype="s16"), 1),
        lambda: hlo.shift_right(parameter(4, dtype="s32"), 1),
        [("shift", "NCC_EVRF022")],
    ),
    "normal": (lambda: drawn("RNG_NORMAL"), lambda: drawn("RNG_UNIFORM"), [("random numbers", "")]),
    "threefry": (lambda: bits("RNG_THREE_FRY"), lambda: bits("RNG_DEFAULT"), [("random numbers", "NCC_EVRF006")]),
    "all-reduce": (
        lambda: hlo.all_reduce(parameter(4, dtype="s32"), 2),
        lambda: hlo.all_reduce(parameter(4, dtype="bf16"), 2),
        [("integer sums", "NCC_EVRF061")],
    ),
    "reduce-scatter": (
        lambda: hlo.reduce_scatter(parameter(4, dtype="u32"), 2, 0),
        lambda: hlo.reduce_scatter(parameter(4), 2, 0),
        [("integer sums", "NCC_EVRF063")],
    ),
    "groups": (
        lambda: hlo.all_gather(parameter(4), 4, 0),
        lambda: hlo.all_gather(parameter(4), 8, 0),
        [("replica groups", "")],
    ),
    "target": (custom("TopK", "f32"), custom("AwsNeuronGelu", "f32"), [("custom call", "NCC_EVRF015")]),
    "top-k of two": (
        custom("AwsNeuronTopK", "f32", "f32", config="4"),
        custom("AwsNeuronTopK", "f32", config="4"),
        [("custom call", "")],
    ),
    "top-k of s32": (
        custom("AwsNeuronTopK", "s32", config="4"),
        custom("AwsNeuronTopK", "bf16", config="4"),
        [("custom call", "NCC_EVRF013")],
    ),
    "top-k of JSON": (
        custom("AwsNeuronTopK", "f32", config='{"k": 4}'),
        custom("AwsNeuronTopK", "f16", config="4"),
        [("custom call", "")],
    ),
    "too many": (
        custom("AwsNeuronTopK", "f32", config="16385"),
        custom("AwsNeuronTopK", "f32", config="16384"),
        [("custom call", "NCC_EVRF014")],
    ),
    "argmax": (
        custom("AwsNeuronArgMax", "s8", config="0"),
        custom("AwsNeuronArgMax", "s32", config="0"),
        [("custom call", "")],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_breaks_a_rule_and_what_does_not(case):
    bad, good, wanted = CASES[case]
    assert named(bad) == wanted
    if good is not None:
        assert named(good) == []


@pytest.mark.parametrize("target", sorted(CUSTOM_CALLS - {"AwsNeuronTopK", "AwsNeuronArgMax"}))
def test_custom_calls_that_the_compiler_knows(target):
    assert named(custom(target, "f32")) == []


TARGETS = {  # findings for Trainium2, and for Trainium
    "sort": (lambda: hlo.sort(parameter(4)), [("unsupported operation", "NCC_EVRF029")], []),
    "float8": (lambda: hlo.convert(parameter(4, dtype="f8e5m2"), "bf16"), [], [("element type", "NCC_ESPP047")]),
    "integer product": (product("s32"), [("integer sums", "NCC_EVRF035")], []),
    "narrow product": (product("s8"), [], []),
    "degree": (lambda: hlo.all_reduce(parameter(4), 64), [], [("replica groups", "")]),
}


@pytest.mark.parametrize("case", TARGETS)
def test_what_differs_by_target(case):
    function, of_two, of_one = TARGETS[case]
    assert named(function, "trn2") == of_two
    assert named(function, "trn1") == named(function, "neuron") == of_one


@pytest.mark.parametrize(
    ("case", "by"), [("reduce by or", "by or"), ("reduce by more", "by several"), ("reduce two", "by several")]
)
def test_what_a_reduction_combines_by(case, by):
    [found] = check(write(CASES[case][0]))
    assert by in found.message


@pytest.mark.parametrize("case", CASES)
def test_a_module_with_gaps_is_no_obstacle(case):
    module = write(CASES[case][0])
    for computation in module.computations:
        for instruction in computation.instructions:
            instruction.operand_ids[:] = [number + 1000 for number in instruction.operand_ids]
            instruction.called_computation_ids[:] = [number + 1000 for number in instruction.called_computation_ids]
    check(module)
    for instruction in entry_of(module).instructions:
        del instruction.operand_ids[:]
        instruction.ClearField("literal")
    check(module)
