"""Every function of `hlo.elementwise` computes on XLA:CPU what NumPy computes."""

import math
import operator

import numpy as np
import pytest

from transformers_neuronx import hlo
from transformers_neuronx.pyhlo.dtypes import ELEMENT_TYPES, FLOATS, element_type

# Relative error of a rounded result.
TOLERANCE = {"f64": 1e-12, "f32": 4e-6, "f16": 2e-3, "bf16": 1e-2, "f8e4m3fn": 0.07, "f8e5m2": 0.15}
INF, NAN = math.inf, math.nan


def array(values, dtype="f32"):
    return np.array(values).astype(element_type(dtype).numpy)


def wide(x):
    """Convert floats to f64, so that NumPy's reference is exact enough; leave other types unchanged."""
    return x.astype(np.float64) if x.dtype.kind in "fV" else x


def same(got, want, dtype=None):
    """Assert equal bits, or for floats of `dtype` equality within its rounding."""
    if dtype in FLOATS:
        assert got.dtype == element_type(dtype).numpy
        np.testing.assert_allclose(wide(got), wide(array(want, dtype)), TOLERANCE[dtype], TOLERANCE[dtype] / 10)
    else:
        assert got.dtype == np.asarray(want).dtype
        np.testing.assert_array_equal(wide(got), wide(np.asarray(want)))


UNARY = dict(
    abs=np.abs,
    ceil=np.ceil,
    cos=np.cos,
    erf=np.vectorize(math.erf),
    exp=np.exp,
    expm1=np.expm1,
    floor=np.floor,
    log=np.log,
    log1p=np.log1p,
    logistic=lambda x: 1 / (1 + np.exp(-x)),
    negate=np.negative,
    round=np.rint,
    rsqrt=lambda x: 1 / np.sqrt(x),
    sign=np.sign,
    sin=np.sin,
    sqrt=np.sqrt,
    tanh=np.tanh,
)


@pytest.mark.parametrize("dtype", ["f64", "f32", "f16", "bf16"])
@pytest.mark.parametrize("name", UNARY)
def test_functions_of_one_float(run, name, dtype):
    x = array([-INF, -3, -2.5, -1.5, -0.5, -0.01, 0, 1e-3, 0.5, 1, 2.5, 3.5, INF, NAN], dtype)
    with np.errstate(all="ignore"):
        want = UNARY[name](wide(x))
    same(run(getattr(hlo, name), x)[0], want, dtype)


@pytest.mark.parametrize("name", ["abs", "negate", "sign"])
@pytest.mark.parametrize("dtype", ["s8", "s32", "s64"])
def test_functions_of_one_integer(run, name, dtype):
    x = array([-7, -1, 0, 1, 100], dtype)
    same(run(getattr(hlo, name), x)[0], UNARY[name](x))


@pytest.mark.parametrize("x", [array([True, False], "pred"), array([0, 1, -5], "s32"), array([0, 255], "u8")])
def test_not_inverts_predicates_and_bits(run, x):
    same(run(hlo.logical_not, x)[0], ~x)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16", "f8e5m2"])
def test_is_finite(run, dtype):
    same(run(hlo.is_finite, array([1, INF, -INF, NAN, 0], dtype))[0], [True, False, False, False, True])


BINARY = dict(
    add=np.add,
    divide=lambda a, b: a / b if a.dtype.kind == "f" else np.trunc(a / b).astype(a.dtype),
    maximum=np.maximum,
    minimum=np.minimum,
    multiply=np.multiply,
    power=np.power,
    remainder=np.fmod,
    subtract=np.subtract,
)


@pytest.mark.parametrize("dtype", ["f64", "f32", "f16", "bf16", "f8e4m3fn", "f8e5m2", "s8", "s32", "s64", "u8", "u32"])
@pytest.mark.parametrize("name", BINARY)
def test_functions_of_two_numbers(run, name, dtype):
    a = array([7, 3, 1, 0, 6, 5, 2] if dtype[0] == "u" else [7, -7, 1.5, 0, -6, 5, 2], dtype)
    b = array([2, 3, 3, 4, 1, 5, 7] if name == "power" or dtype[0] == "u" else [2, 2, -3, 4, -1, 5, 7], dtype)
    with np.errstate(over="ignore"):
        same(run(getattr(hlo, name), a, b)[0], BINARY[name](wide(a), wide(b)), dtype)


@pytest.mark.parametrize("name", ["maximum", "minimum"])
def test_the_larger_and_the_smaller_of_a_number_and_nan_is_nan(run, name):
    same(run(getattr(hlo, name), array([NAN, 1]), array([1, NAN]))[0], array([NAN, NAN]))


BITS = dict(
    logical_and=np.bitwise_and,
    logical_or=np.bitwise_or,
    logical_xor=np.bitwise_xor,
    shift_left=np.left_shift,
    shift_right=np.right_shift,
)


@pytest.mark.parametrize("dtype", ["s8", "s32", "u8", "u32"])
@pytest.mark.parametrize("name", BITS)
def test_functions_of_bits(run, name, dtype):
    a, b = array([0x7E, -100, 3, 0], dtype), array([1, 2, 0, 5], dtype)
    same(run(getattr(hlo, name), a, b)[0], BITS[name](a, b))


@pytest.mark.parametrize("name", ["logical_and", "logical_or", "logical_xor"])
def test_functions_of_predicates(run, name):
    a, b = array([1, 1, 0, 0], "pred"), array([1, 0, 1, 0], "pred")
    same(run(getattr(hlo, name), a, b)[0], BITS[name](a, b))


def test_a_number_shifts_like_a_tensor_of_its_type(run):
    same(run(lambda x: hlo.shift_right(-8, x), array([1, 2], "s32"))[0], array([-4, -2], "s32"))


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f8e4m3fn", "s8", "u32", "pred"])
@pytest.mark.parametrize("name", ["equal", "not_equal", "less", "less_equal", "greater", "greater_equal"])
def test_comparisons(run, name, dtype):
    odd = 1 if dtype == "pred" else NAN if dtype in FLOATS else -1  # -1 is the largest u32
    a, b = array([0, 1, 1, 0, odd, odd], dtype), array([0, 0, 1, 1, odd, 0], dtype)
    with np.errstate(invalid="ignore"):
        same(run(getattr(hlo, name), a, b)[0], getattr(np, name)(a, b))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((2, 3), (3,)),
        ((2, 1), (1, 3)),
        ((), (2, 3)),
        ((4,), (1, 1)),
        ((2, 1, 3), (5, 1)),
        ((0, 3), (1, 3)),
        ((1,), (0,)),
    ],
)
def test_shapes_broadcast_as_in_numpy(run, a, b):
    x, y = np.arange(math.prod(a), dtype="f").reshape(a), 10 * np.arange(1, math.prod(b) + 1, dtype="f").reshape(b)
    same(run(hlo.add, x, y)[0], x + y)
    same(run(hlo.greater, y, x)[0], y > x)


@pytest.mark.parametrize("dtype", ["f32", "s32", "bf16", "u8"])
def test_numbers_take_the_type_of_the_tensor(run, dtype):
    x = array([[1, 2], [3, 4]], dtype)
    two = array(2, dtype)
    got = run(lambda x: (x + 2, 2 * x, hlo.maximum(2, x)), x)
    for result, want in zip(got, (x + two, two * x, np.maximum(two, x)), strict=True):
        same(result, want)


OPERATORS = [
    operator.add,
    operator.sub,
    operator.mul,
    operator.truediv,
    operator.lt,
    operator.le,
    operator.gt,
    operator.ge,
]


@pytest.mark.parametrize("op", OPERATORS)
def test_operators_are_the_functions_they_look_like(run, op):
    x, y = array([1, 2, 3]), array([3, 2, 1])
    got = run(lambda x, y: (op(x, y), op(x, 2.0), op(2.0, x)), x, y)
    for result, want in zip(got, (op(x, y), op(x, array(2.0)), op(array(2.0), x)), strict=True):
        same(result, want)


def test_operators_on_predicates_and_minus(run):
    p, q, x = array([1, 1, 0], "pred"), array([1, 0, 0], "pred"), array([1, -2, 0])
    got = run(lambda p, q, x: (p & q, p | q, ~p, -x), p, q, x)
    for result, want in zip(got, (p & q, p | q, ~p, -x), strict=True):
        same(result, want)


def test_select_keeps_out_what_it_does_not_choose(run):
    c, x = array([1, 0, 0], "pred"), array([1, NAN, INF])
    kept, dropped = run(lambda c, x: (hlo.select(c, x, 0.0), hlo.select(c, 0.0, x)), c, x)
    same(kept, array([1, 0, 0]))
    same(dropped, array([0, NAN, INF]))


@pytest.mark.parametrize("dtype", ["f32", "bf16", "s8", "pred", "f8e4m3fn"])
def test_select_broadcasts_condition_and_choices(run, dtype):
    c, x, y = array([[1], [0]], "pred"), array([1, 0, 1], dtype), array([[0, 1, 0], [1, 1, 0]], dtype)
    same(run(hlo.select, c, x, y)[0], np.where(c, x, y))


@pytest.mark.parametrize("dtype", ["f32", "bf16", "s32"])
def test_clamp(run, dtype):
    x, low, four = array([[-5, 0, 3], [9, 1, 2]], dtype), array([[1], [-9]], dtype), array(4, dtype)
    same(run(lambda low, x: hlo.clamp(low, x, 4), low, x)[0], np.minimum(np.maximum(x, low), four))


NUMBERS = [0, 1, -1, 2.5, -3.5, 100.7, 1 / 3]


CONVERTED = ["f64", "f32", "f16", "bf16", "f8e4m3fn", "f8e5m2", "s8", "s32", "s64", "pred"]


@pytest.mark.parametrize("of", ["f32", "bf16", "f16", "f8e4m3fn", "f8e5m2", "s8", "s32", "pred"])
def test_convert_rounds_truncates_and_asks_for_zero_as_numpy_does(run, of):
    x = array(NUMBERS, of)
    got = run(lambda x: [hlo.convert(x, to) for to in CONVERTED], x)
    for result, to in zip(got, CONVERTED, strict=True):
        same(result, x.astype(element_type(to).numpy))


@pytest.mark.parametrize(
    ("of", "to"), [("f32", "s32"), ("bf16", "u16"), ("s8", "u8"), ("f8e5m2", "s8"), ("f64", "u64")]
)
def test_bitcast_convert_keeps_the_bits(run, of, to):
    x = array(NUMBERS, of)
    same(run(lambda x: hlo.bitcast_convert(x, to), x)[0], x.view(element_type(to).numpy))


@pytest.mark.parametrize("dtype", ELEMENT_TYPES)
def test_constants_and_arguments_of_every_type(run, dtype):
    x = array([[0, 1, 3], [2, -3, 5]], dtype)
    got = run(
        lambda x: (x, hlo.constant(x_value, dtype), hlo.full(1, dtype, [2, 2]), hlo.full(1, dtype, [])), x_value := x
    )
    for result, want in zip(got, (x, x, np.ones((2, 2), x.dtype), np.ones((), x.dtype)), strict=True):
        same(result, want)
