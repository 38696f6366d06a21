"""Every shape rule of `hlo` refuses what breaks it, and names the operation, what it needs and what it got."""

import re

import pytest

from transformers_neuronx import hlo
from transformers_neuronx.compiler import compile_py_func
from transformers_neuronx.errors import GraphError
from transformers_neuronx.pyhlo import dtype_named

FLOATING = ["ceil", "cos", "erf", "exp", "expm1", "floor", "log", "log1p", "logistic", "rsqrt", "sin", "sqrt", "tanh"]
ARITHMETIC = ["add", "divide", "maximum", "minimum", "multiply", "power", "remainder", "subtract"]
COMPARISONS = dict(equal="EQ", not_equal="NE", less="LT", less_equal="LE", greater="GT", greater_equal="GE")
BITWISE = dict(
    logical_and="and", logical_or="or", logical_xor="xor", shift_left="shift_left", shift_right="shift_right"
)


def refused(function, shapes, message):
    """Assert that `function` of parameters a, b, c, … with `shapes`, as in "f32[2,3] s32[]", says `message`."""

    def graph(_):
        tensors = []
        for number, (dtype, sizes) in enumerate(re.findall(r"(\w+)\[([\d,]*)\]", shapes)):
            shape = dtype_named(dtype)[[int(size) for size in sizes.split(",") if size]]
            tensors.append(shape.Parameter(parameter_number=number, name="abc"[number]))
        function(*tensors)
        pytest.fail("nothing was refused")

    with pytest.raises(GraphError) as caught:
        compile_py_func(graph)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", FLOATING)
def test_operations_on_floats_refuse_integers(name):
    refused(getattr(hlo, name), "s32[2]", f"{name} needs floating-point elements, got a.1:s32[2]")


@pytest.mark.parametrize(
    ("name", "op"),
    [(n, n) for n in ARITHMETIC] + [(n, f"compare {d}") for n, d in COMPARISONS.items()] + list(BITWISE.items()),
)
def test_operations_on_two_tensors_refuse_what_is_not_alike(name, op):
    function = getattr(hlo, name)
    refused(function, "s32[2] s32[3]", f"{op} needs shapes that broadcast, got a.1:s32[2] and b.2:s32[3]")
    refused(function, "s32[2] u8[2]", f"{op} needs one element type, got a.1:s32[2] and b.2:u8[2]: convert one of them")
    refused(lambda: function(1, 2), "", f"{op} needs at least one tensor, got (1, 2)")


@pytest.mark.parametrize(("name", "op"), BITWISE.items())
def test_operations_on_bits_refuse_floats(name, op):
    op = op.replace("shift_right", "shift_right_logical")
    refused(getattr(hlo, name), "f32[2] f32[2]", f"{op} needs integers or predicates, got a.1:f32[2]")


def slide(x, kernel):
    return hlo.convolution(x, kernel, [1], [(0, 0)], [1], [1], groups=2)


X = "f32[2,3]"
CASES = [
    # numbers with tensors
    (lambda a: a * 0.5, "s32[2]", "multiply needs a number that fits s32, the type of a.1:s32[2], got 0.5"),
    (lambda a: 300 + a, "s8[2]", "add needs a number that fits s8, the type of a.1:s8[2], got 300"),
    (lambda a: a + float("nan"), "s32[2]", "add needs a number that fits s32, the type of a.1:s32[2], got nan"),
    (
        lambda a: hlo.minimum(a, float("inf")),
        "s32[2]",
        "minimum needs a number that fits s32, the type of a.1:s32[2], got inf",
    ),
    (lambda a: a - (-1), "u8[2]", "subtract needs a number that fits u8, the type of a.1:u8[2], got -1"),
    # elementwise
    (hlo.negate, "pred[2]", "negate needs signed numbers, got a.1:pred[2]"),
    (hlo.abs, "u32[2]", "abs needs signed numbers, got a.1:u32[2]"),
    (hlo.sign, "pred[2]", "sign needs signed numbers, got a.1:pred[2]"),
    (
        lambda a: hlo.bitcast_convert(a, "u8"),
        "pred[2]",
        "bitcast_convert needs types of equal width, none of them pred, got a.1:pred[2] and u8",
    ),
    (hlo.round, "s32[2]", "needs floating-point elements, got a.1:s32[2]"),
    (hlo.is_finite, "s32[2]", "is_finite needs floating-point elements, got a.1:s32[2]"),
    (hlo.logical_not, "f32[2]", "not needs integers or predicates, got a.1:f32[2]"),
    (lambda a: hlo.convert(a, "f31"), X, "unknown element type 'f31'; expected one of pred, s4"),
    (
        lambda a: hlo.bitcast_convert(a, "bf16"),
        X,
        "bitcast_convert needs types of equal width, none of them pred, got a.1:f32[2,3] and bf16",
    ),
    (lambda a: hlo.broadcast_to(a, [2, 4]), X, "broadcast_to needs sizes that a.1:f32[2,3] broadcasts to, got [2, 4]"),
    (lambda a: hlo.broadcast_to(a, [3]), X, "broadcast_to needs sizes that a.1:f32[2,3] broadcasts to, got [3]"),
    (hlo.select, "s32[2] f32[2] f32[2]", "select needs predicates as its condition, got a.1:s32[2]"),
    (hlo.select, "pred[2] f32[2] s32[2]", "select needs one element type, got b.2:f32[2] and c.3:s32[2]"),
    (
        hlo.select,
        "pred[2] f32[3] f32[3]",
        "select needs shapes that broadcast, got condition a.1:pred[2] and branches b.2:f32[3]",
    ),
    (lambda a: hlo.select(a, 1.0, 0.0), "pred[2]", "select needs at least one tensor, got (1.0, 0.0)"),
    (
        hlo.clamp,
        "f32[2] f32[3] f32[2]",
        "clamp needs shapes that broadcast, got a.1:f32[2] and b.2:f32[3] and c.3:f32[2]",
    ),
    (hlo.clamp, "s32[] f32[3] s32[]", "clamp needs one element type"),
    (lambda a: a + hlo.convert(a, "bf16"), X, "add needs one element type, got a.1:f32[2,3] and convert.2:bf16[2,3]"),
    # windows
    (
        slide,
        "f32[1,4,8] bf16[2,4,3]",
        "convolution needs a kernel of the type and rank of a.1:f32[1,4,8], got b.2:bf16[2,4,3]",
    ),
    (
        slide,
        "f32[1,4,8] f32[2,4]",
        "convolution needs a kernel of the type and rank of a.1:f32[1,4,8], got b.2:f32[2,4]",
    ),
    (slide, "f32[4,8] f32[2,4]", "convolution needs a kernel of the type and rank of a.1:f32[4,8], got b.2:f32[2,4]"),
    (
        slide,
        "f32[1,4,8] f32[2,3,3]",
        "convolution in 2 groups needs a kernel [out, in / groups, ...] for a.1:f32[1,4,8], got b.2:f32[2,3,3]",
    ),
    (
        slide,
        "f32[1,4,8] f32[3,2,3]",
        "convolution in 2 groups needs a kernel [out, in / groups, ...] for a.1:f32[1,4,8]",
    ),
    (
        lambda a: hlo.reduce_window(a, "Add", 0, [1, 1, 1], [1] * 3, [(0, 0)] * 3, [1] * 3),
        X,
        "reduce_window needs an axis for each axis of the window [1, 1, 1], got a.1:f32[2,3]",
    ),
    # shaping
    (lambda: hlo.iota("pred", [2]), "", "iota needs a numeric element type, got pred"),
    (lambda a: hlo.split(a, 0), X, "split: parts must divide axis 1 of a.1:f32[2,3], got 0"),
    (lambda a: hlo.split(a, -3), X, "split: parts must divide axis 1 of a.1:f32[2,3], got -3"),
    (lambda: hlo.concatenate([], 0), "", "concatenate needs at least one tensor, got none"),
    (lambda a: hlo.reverse(a, 0, -2), X, "reverse: axes of a.1:f32[2,3] must not repeat, got [0, -2]"),
    (
        lambda a: hlo.dynamic_slice(a, [0, 0], [1]),
        X,
        "dynamic_slice needs a start per axis and a block inside a.1:f32[2,3]",
    ),
    (
        lambda a, b, c: hlo.dynamic_slice(a, [b, c], [1, 1]),
        "f32[2,3] u32[] s32[]",
        "dynamic_slice needs integer scalars of one type as starts, got [b.2:u32[], c.3:s32[]]",
    ),
    (hlo.take_rows, "f32[2] s32[2]", "take_rows needs an integer index per row of a.1:f32[2], got b.2:s32[2]"),
    (
        lambda a, b: hlo.gather_rows(a, b, (0, 1)),
        "f32[2,3] s32[5,3]",
        "gather_rows needs integer indices [..., 2], got b.2:s32[5,3]",
    ),
    (
        lambda a, b, c: hlo.scatter_rows(a, b, c, (0, 1)),
        "f32[2,3] f32[5,2] f32[5]",
        "scatter_rows needs integer indices [..., 2], got b.2:f32[5,2]",
    ),
    (lambda: hlo.iota("s32", [2, 3], 2), "", "iota needs an axis of [2, 3], got 2"),
    (lambda: hlo.iota("s32", []), "", "iota needs an axis of [], got 0"),
    (lambda a: hlo.reshape(a, 4, 2), X, "reshape: sizes must hold the 6 elements of a.1:f32[2,3], got [4, 2]"),
    (lambda a: hlo.reshape(a, 4, -1), X, "reshape: sizes must hold the 6 elements of a.1:f32[2,3], got [4, -1]"),
    (lambda a: hlo.reshape(a, -1, -1), X, "reshape: sizes must hold the 6 elements of a.1:f32[2,3], got [-1, -1]"),
    (lambda a: hlo.transpose(a, 0), X, "transpose: axes must be a permutation of those of a.1:f32[2,3], got [0]"),
    (lambda a: hlo.transpose(a, 0, 0), X, "transpose: axes must be a permutation of those of a.1:f32[2,3], got [0, 0]"),
    (lambda a: hlo.reverse(a, 2), X, "reverse needs an axis of a.1:f32[2,3], got 2"),
    (
        lambda a, b: hlo.concatenate([a, b], 0),
        "f32[2,3] f32[2,4]",
        "concatenate on axis 0 needs equal types and equal other sizes, got a.1:f32[2,3] and b.2:f32[2,4]",
    ),
    (
        lambda a, b: hlo.concatenate([a, b], 0),
        "f32[2] s32[2]",
        "concatenate on axis 0 needs equal types and equal other sizes",
    ),
    (lambda a: hlo.concatenate([a, a], 2), X, "concatenate needs an axis of a.1:f32[2,3], got 2"),
    (lambda a: hlo.slice(a, 1, 0, 4), X, "slice needs bounds inside axis 1 of a.1:f32[2,3], got 0:4:1"),
    (lambda a: hlo.slice(a, 1, 2, 1), X, "slice needs bounds inside axis 1 of a.1:f32[2,3], got 2:1:1"),
    (lambda a: hlo.slice(a, 1, 0, 2, 0), X, "slice needs bounds inside axis 1 of a.1:f32[2,3], got 0:2:0"),
    (lambda a: hlo.slice(a, -3, 0, 2), X, "slice needs an axis of a.1:f32[2,3], got -3"),
    (lambda a: hlo.split(a, 2), X, "split: parts must divide axis 1 of a.1:f32[2,3], got 2"),
    (lambda a: hlo.pad(a, 0, -1, 0), X, "pad: widths must not be negative, got -1 and 0 for a.1:f32[2,3]"),
    (
        lambda a: hlo.dynamic_slice(a, [0], [1, 1]),
        X,
        "dynamic_slice needs a start per axis and a block inside a.1:f32[2,3], got [1, 1]",
    ),
    (
        lambda a: hlo.dynamic_slice(a, [0, 0], [1, 4]),
        X,
        "dynamic_slice needs a start per axis and a block inside a.1:f32[2,3], got [1, 4]",
    ),
    (
        lambda a, b: hlo.dynamic_slice(a, [b, 0], [1, 1]),
        "f32[2,3] f32[]",
        "dynamic_slice needs integer scalars of one type as starts, got [b.2:f32[], constant.3:f32[]]",
    ),
    (
        lambda a, b: hlo.dynamic_update_slice(a, b, [0, 0]),
        "f32[2,3] s32[1,1]",
        "dynamic_update_slice needs a start per axis and a block of the type and rank of a.1:f32[2,3]",
    ),
    (
        lambda a, b: hlo.dynamic_update_slice(a, b, [0, 0]),
        "f32[2,3] f32[1,4]",
        "dynamic_update_slice needs a block that fits into a.1:f32[2,3], got b.2:f32[1,4]",
    ),
    (
        lambda a, b: hlo.dynamic_update_slice(a, a, [b, 0]),
        "f32[2,3] s32[1]",
        "dynamic_update_slice needs integer scalars of one type as starts",
    ),
    (hlo.take, "f32[2,3] f32[2]", "take needs integer indices, got b.2:f32[2]"),
    (lambda a, b: hlo.take(a, b, 2), "f32[2,3] s32[2]", "take needs an axis of a.1:f32[2,3], got 2"),
    (hlo.take_rows, "f32[2,3] s32[3]", "take_rows needs an integer index per row of a.1:f32[2,3], got b.2:s32[3]"),
    (hlo.take_rows, "f32[2,3] f32[2]", "take_rows needs an integer index per row of a.1:f32[2,3], got b.2:f32[2]"),
    (
        lambda a, b, c: hlo.scatter_rows(a, b, c, (0, 1)),
        "f32[2,3,4] s32[5,1,2] f32[5,1,3]",
        "scatter_rows needs updates f32[5, 1, 4] for a.1:f32[2,3,4], got c.3:f32[5,1,3]",
    ),
    # contraction
    (lambda a: hlo.dot(a, a, ([0, 0], [0, 0])), X, "dot: axes of a.1:f32[2,3] must not repeat, got [0, 0]"),
    (lambda a: hlo.dot(a, a, ([0], [0]), ([0], [0])), X, "dot: axes of a.1:f32[2,3] must not repeat, got [0, 0]"),
    (lambda a: hlo.mean(a, 0), "s32[2]", "mean needs floating-point elements, got a.1:s32[2]"),
    (lambda a: hlo.any(a, 0), "s32[2]", "any needs predicates, got a.1:s32[2]"),
    (lambda a: hlo.all(a, 0), "f32[2]", "all needs predicates, got a.1:f32[2]"),
    (lambda a: hlo.top_k(a, 1), "f32[]", "top_k needs at least one axis, got a.1:f32[]"),
    (
        lambda a, b: hlo.dot(a, b, ([1], [0])),
        "f32[2,3] f32[4,2]",
        "dot needs equal contracting sizes, got [3] of a.1:f32[2,3] and [4] of b.2:f32[4,2]",
    ),
    (
        lambda a, b: hlo.dot(a, b, ([1], [1]), ([0], [0])),
        "f32[2,3] f32[4,3]",
        "dot needs equal batch sizes, got [2] of a.1:f32[2,3] and [4] of b.2:f32[4,3]",
    ),
    (
        lambda a, b: hlo.dot(a, b, ([1], [0])),
        "f32[2,3] bf16[3,2]",
        "dot needs one element type, got a.1:f32[2,3] and b.2:bf16[3,2]: convert one of them",
    ),
    (lambda a, b: hlo.dot(a, b, ([2], [0])), "f32[2,3] f32[3,2]", "dot needs an axis of a.1:f32[2,3], got 2"),
    (lambda a: hlo.reduce(a, "Add", 0, 2), X, "reduce needs an axis of a.1:f32[2,3], got 2"),
    (lambda a: hlo.sum(a, [0, -3]), X, "reduce needs an axis of a.1:f32[2,3], got -3"),
    (lambda a: hlo.argmax(a, 2), X, "argmax needs an axis of a.1:f32[2,3], got 2"),
    (lambda a: hlo.sort(a, 2), X, "sort needs an axis of a.1:f32[2,3], got 2"),
    (
        lambda a, b: hlo.sort(a, payload=b),
        "f32[2,3] s32[3]",
        "sort needs a payload of the sizes of a.1:f32[2,3], got b.2:s32[3]",
    ),
    (lambda a: hlo.top_k(a, 4), X, "top_k: k must be from 1 to 3, the last axis of a.1:f32[2,3], got 4"),
    (lambda a: hlo.top_k(a, 0), X, "top_k: k must be from 1 to 3, the last axis of a.1:f32[2,3], got 0"),
    (lambda a: hlo.element(a, 0), X, "element needs a tuple with more than 0 elements, got a.1:f32[2,3]"),
    (lambda a: hlo.element(a.scribe.tuple(a.shape).Tuple(a), 1), X, "element needs a tuple with more than 1 elements"),
    # control
    (hlo.composite("mine", lambda: None), "", "mine needs at least one tensor, got none"),
    (
        lambda a: hlo.composite("mine", lambda a, by: a)(a, by={1}),
        X,
        "mine: attributes must be JSON values, got {'by': {1}}",
    ),
    (lambda a: hlo.composite("mine", lambda a, b: a)(a), X, "mine: missing a required argument: 'b'"),
    (lambda a: hlo.composite("mine", lambda a: a)([a, 2]), X, "mine: a must be tensors alone, got 2 among them"),
    (
        lambda a: hlo.composite("mine", lambda b: a + b)(a),
        X,
        "Add needs tensors of the computation that is being written, got a.1:f32[2,3]",
    ),
    (
        lambda a, b: hlo.conditional(a, hlo.abs, hlo.negate, b),
        "s32[] f32[]",
        "conditional: predicate must be a pred scalar, got a.1:s32[]",
    ),
    (
        lambda a: hlo.composite("mine", lambda a: a)(a.scribe.tuple(a.shape).Tuple(a)),
        X,
        "mine needs arrays, got the tuple tuple.2:(f32[2,3])",
    ),
    (
        lambda a: hlo.while_loop(lambda a: a, lambda a: [a], [a]),
        "f32[]",
        "while_loop: condition must be a pred scalar, got get-tuple-element",
    ),
    (
        lambda a: hlo.while_loop(lambda a: a < 1.0, lambda a: [a, a], [a]),
        "f32[]",
        "while_loop: body must keep the shapes [f32[]], got [get-tuple-element",
    ),
    (
        lambda a, b: hlo.conditional(a, lambda b: b, lambda b: hlo.sum(b, 0), b),
        "pred[] f32[2]",
        "conditional: branches must return one shape, got f32[2] and f32[]",
    ),
    (lambda a: hlo.all_gather(a, 2, 2), X, "all_gather needs an axis of a.1:f32[2,3], got 2"),
    (
        lambda a: hlo.reduce_scatter(a, 2, 1),
        X,
        "reduce_scatter: axis 1 of a.1:f32[2,3] must be divisible by the number of devices, got 2",
    ),
    (lambda a: hlo.reduce_scatter(a, 2, -3), X, "reduce_scatter needs an axis of a.1:f32[2,3], got -3"),
]


@pytest.mark.parametrize(("function", "shapes", "message"), CASES, ids=[message[:60] for *_, message in CASES])
def test_shape_rules_refuse_what_breaks_them(function, shapes, message):
    refused(function, shapes, message)
