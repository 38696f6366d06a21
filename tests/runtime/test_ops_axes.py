"""Functions of `hlo` that move, sum, choose and sort along axes give NumPy's results."""

import math

import numpy as np
import pytest

from transformers_neuronx import hlo
from transformers_neuronx.pyhlo.dtypes import element_type

MOVED = ["f32", "bf16", "s8", "pred", "f8e4m3fn"]  # moving does not depend on the values
INF, NAN = math.inf, math.nan


def array(values, dtype="f32"):
    return np.array(values).astype(element_type(dtype).numpy)


def counted(*sizes, dtype="f32"):
    return np.arange(math.prod(sizes)).reshape(sizes).astype(element_type(dtype).numpy)


def same(got, want):
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    np.testing.assert_array_equal(got.astype(np.float64), want.astype(np.float64))


def check(run, function, reference, arrays):
    """Assert that one program gives the result of `reference` for each of `arrays`."""
    for got, array in zip(run(lambda *tensors: [function(x) for x in tensors], *arrays), arrays, strict=True):
        same(got, reference(array))


# Moves of x [2, 3, 4]: in PyHLO, and in NumPy.
MOVES = dict(
    reshape=(lambda x: hlo.reshape(x, 4, -1), lambda x: x.reshape(4, -1)),
    reshape_to_a_scalar=(lambda x: hlo.reshape(hlo.slice(hlo.reshape(x, -1), 0, 5, 6)), lambda x: x.reshape(-1)[5]),
    transpose=(lambda x: hlo.transpose(x, 2, 0, 1), lambda x: x.transpose(2, 0, 1)),
    transpose_to_itself=(lambda x: hlo.transpose(x, 0, 1, 2), lambda x: x),
    reverse=(lambda x: hlo.reverse(x, 0, -1), lambda x: x[::-1, :, ::-1]),
    reverse_nothing=(lambda x: hlo.reverse(x), lambda x: x),
    concatenate=(lambda x: hlo.concatenate([x, x, x], -2), lambda x: np.concatenate([x] * 3, 1)),
    concatenate_one=(lambda x: hlo.concatenate([x], 0), lambda x: x),
    concatenate_nothing=(lambda x: hlo.concatenate([hlo.slice(x, 1, 2, 2), x], 1), lambda x: x),
    slice=(lambda x: hlo.slice(x, -1, 1, 4, 2), lambda x: x[:, :, 1:4:2]),
    slice_nothing=(lambda x: hlo.slice(x, 1, 3, 3), lambda x: x[:, 3:3]),
    slice_everything=(lambda x: hlo.slice(x, 1, 0, 3), lambda x: x),
    split=(lambda x: hlo.split(x, 3, 1)[2], lambda x: x[:, 2:]),
    split_the_last_axis=(lambda x: hlo.split(x, 2)[1], lambda x: x[:, :, 2:]),
    pad=(
        lambda x: hlo.pad(x, -2, 1, 2, 1),
        lambda x: np.pad(x, [(0, 0), (1, 2), (0, 0)], constant_values=x.dtype.type(1)),
    ),
    pad_nothing=(lambda x: hlo.pad(x, 0, 0, 0), lambda x: x),
    broadcast_to=(
        lambda x: hlo.broadcast_to(hlo.slice(x, 1, 0, 1), [5, 2, 3, 4]),
        lambda x: np.broadcast_to(x[:, :1], (5, 2, 3, 4)),
    ),
    dynamic_slice=(lambda x: hlo.dynamic_slice(x, [1, 0, 2], [1, 3, 2]), lambda x: x[1:2, :, 2:4]),
    dynamic_slice_moved_in=(lambda x: hlo.dynamic_slice(x, [-4, 9, 3], [1, 2, 2]), lambda x: x[:1, 1:3, 2:4]),
    optimization_barrier=(lambda x: hlo.optimization_barrier(x)[0], lambda x: x),
)


@pytest.mark.parametrize("name", MOVES)
def test_moves(run, name):
    function, reference = MOVES[name]
    check(run, function, reference, [counted(2, 3, 4, dtype=dtype) for dtype in MOVED])


@pytest.mark.parametrize("dtype", ["s8", "s32", "u32", "s64", "f32", "bf16"])
def test_iota_counts_along_its_axis(run, dtype):
    rows, columns = run(lambda x: [hlo.iota(dtype, x.sizes, axis) for axis in (0, 1)], counted(2, 3))
    same(rows, array([[0, 0, 0], [1, 1, 1]], dtype))
    same(columns, array([[0, 1, 2], [0, 1, 2]], dtype))


@pytest.mark.parametrize("index", ["s32", "u32", "s64", "s8", "u8"])
@pytest.mark.parametrize("start", [0, 2, 4, 120])
def test_starts_come_at_run_time_and_are_moved_in(run, index, start):
    x, block = counted(5, 3), -counted(3, 2)

    def graph(x, block, i):
        return hlo.dynamic_slice(x, [i, i], [2, 2]), hlo.dynamic_update_slice(x, block, [i, i])

    cut, updated = run(graph, x, block, array(start, index))
    same(cut, x[min(start, 3) :, min(start, 1) :][:2, :2])
    want = x.copy()
    want[min(start, 2) :, min(start, 1) :][:3, :2] = block
    same(updated, want)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_take_puts_the_sizes_of_the_indices_in_place_of_the_axis(run, axis):
    i = array([[1, 0, 1], [0, 1, 1]], "s32")
    arrays = [counted(2, 3, 4, dtype=dtype) for dtype in MOVED]
    check(run, lambda x: hlo.take(x, hlo.constant(i, "s32"), axis), lambda x: np.take(x, i, axis), arrays)


@pytest.mark.parametrize(
    ("index", "values"), [("s32", [-1, 5, 3, 2**31 - 1]), ("u32", [2**32 - 1, 0]), ("s8", [-128, 127])]
)
def test_an_index_outside_is_moved_to_the_edge(run, index, values):
    x, i = counted(4), array(values, index)
    same(run(hlo.take, x, i)[0], x[np.clip(i.astype(np.int64), 0, 3)])


def test_take_with_a_scalar_drops_the_axis_and_with_no_index_all_of_it(run):
    x = counted(2, 3)
    same(run(lambda x, i: hlo.take(x, i, 1), x, array(2, "s32"))[0], x[:, 2])
    same(run(hlo.take, x, array([], "s32"))[0], x[:0])


def test_take_rows_takes_one_of_each_row(run):
    x = counted(3, 4, 2)
    for values, want in (([2, 0, 3], [2, 0, 3]), ([-1, 4, 99], [0, 3, 3])):
        same(run(hlo.take_rows, x, array(values, "s32"))[0], x[[0, 1, 2], want])


def test_take_rows_counts_further_than_its_indices(run):
    x, i = counted(3, 200), array([0, 1, 2], "u8")
    same(run(hlo.take_rows, x, i)[0], x[[0, 1, 2], i])


@pytest.mark.parametrize("axes", [(0, 1), (0, 2), (1, 2)])
def test_gather_rows_reads_at_two_axes_and_moves_what_is_outside_to_the_edge(run, axes):
    x, places = counted(2, 3, 4), array([[[0, 1], [1, 2]], [[-1, 9], [9, -1]], [[1, 0], [0, 0]]], "s32")
    inside = np.clip(places, 0, [x.shape[axis] - 1 for axis in axes])
    want = np.moveaxis(x, axes, (0, 1))[inside[..., 0], inside[..., 1]]
    same(run(lambda x, i: hlo.gather_rows(x, i, axes), x, places)[0], want)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "s8"])
@pytest.mark.parametrize("axes", [(0, 1), (2, 0), (1, 2)])
def test_scatter_rows_writes_at_two_axes_and_drops_what_is_outside(run, axes, dtype):
    x = counted(3, 4, 2, dtype=dtype)
    (rest,) = {0, 1, 2} - set(axes)
    bounds = x.shape[axes[0]], x.shape[axes[1]]
    places = array([[[0, 1], [1, 0]], [[bounds[0], 0], [1, -1]], [[1, 1], [0, bounds[1]]]], "s32")
    updates = -counted(3, 2, x.shape[rest], dtype=dtype)
    want = x.copy()
    for place, update in zip(places.reshape(-1, 2), updates.reshape(6, -1), strict=True):
        if all(0 <= i < bound for i, bound in zip(place, bounds, strict=True)):
            np.moveaxis(want, axes, (0, 1))[tuple(place)] = update
    same(run(lambda x, i, u: hlo.scatter_rows(x, i, u, axes), x, places, updates)[0], want)


# Contractions.

DOTS = dict(
    matrix=((2, 3), (3, 4), ([1], [0]), ((), ()), "ij,jk->ik"),
    transposed=((3, 2), (4, 3), ([0], [1]), ((), ()), "ji,kj->ik"),
    negative_axes=((2, 3), (4, 3), ([-1], [-1]), ((), ()), "ij,kj->ik"),
    vector=((3,), (3, 4), ([0], [0]), ((), ()), "j,jk->k"),
    inner=((3,), (3,), ([0], [0]), ((), ()), "i,i->"),
    outer=((2,), (3,), ([], []), ((), ()), "i,j->ij"),
    batched=((5, 2, 3), (5, 4, 3), ([2], [2]), ([0], [0]), "bij,bkj->bik"),
    batch_in_the_middle=((2, 5, 3), (3, 4, 5), ([2], [0]), ([1], [2]), "ibj,jkb->bik"),
    two_of_each=((2, 3, 4, 5), (2, 3, 5, 4), ([2, 3], [3, 2]), ([0, 1], [0, 1]), "abij,abji->ab"),
    nothing_to_sum=((2, 0), (0, 3), ([1], [0]), ((), ()), "ij,jk->ik"),
)


@pytest.mark.parametrize(
    "dtypes", ["f32 f32", "f64 f64", "bf16 f32", "f16 f32", "bf16 bf16", "s8 s32", "s32 s32", "f8e4m3fn f32"]
)
@pytest.mark.parametrize("name", DOTS)
def test_dot(run, name, dtypes):
    of, to = dtypes.split()
    a_sizes, b_sizes, contract, batch, subscripts = DOTS[name]
    a, b = counted(*a_sizes, dtype=of) % array(4, of), counted(*b_sizes, dtype=of) % array(3, of)
    want = np.einsum(subscripts, a.astype(np.float64), b.astype(np.float64))  # whole numbers, exact in all types
    same(run(lambda a, b: hlo.dot(a, b, contract, batch, dtype=to), a, b)[0], array(want, to))


def test_a_dot_keeps_the_type_of_its_operands(run):
    assert run(lambda a: hlo.dot(a, a, ([0], [0])), array([1, 2], "bf16"))[0].dtype == array(0, "bf16").dtype


REDUCTIONS = dict(sum=np.sum, max=np.max, min=np.min, mean=np.mean)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("axes", [0, -1, (0, 2), (-1, -3, 1), ()])
@pytest.mark.parametrize("name", ["sum", "max", "min"])
def test_reductions(run, name, axes, keep):
    def reference(x):  # whole numbers, exact in all types
        return REDUCTIONS[name](x.astype(np.float64), axes, keepdims=keep).astype(x.dtype)

    signed = [array(counted(2, 3, 2) * 5 % 7 - 3, dtype) for dtype in ("f32", "bf16", "f64", "f8e5m2", "s8", "s32")]
    unsigned = [array(counted(2, 3, 2) * 5 % 7, dtype) for dtype in ("u8", "u32")]
    check(run, lambda x: getattr(hlo, name)(x, axes, keep), reference, signed + unsigned)


@pytest.mark.parametrize("axes", [1, (0, -1), (-3, -2, -1)])
def test_mean(run, axes):
    x = counted(2, 3, 4)
    got = run(lambda x: (hlo.mean(x, axes), hlo.mean(x, axes, keep=True)), x)
    for result, keep in zip(got, (False, True), strict=True):
        np.testing.assert_allclose(result, x.mean(axes, keepdims=keep), rtol=1e-6)


@pytest.mark.parametrize(("name", "of_nothing"), [("sum", 0), ("max", -INF), ("min", INF)])
def test_reductions_of_nothing_are_their_neutral_element_and_nan_stays(run, name, of_nothing):
    function = getattr(hlo, name)
    same(run(lambda x: function(x, 0), counted(0, 2))[0], array([of_nothing] * 2))
    assert np.isnan(run(lambda x: function(x, 0), array([1, NAN, 2]))[0])


def test_all_and_any(run):
    x = array([[1, 1], [1, 0], [0, 0]], "pred")
    got = run(
        lambda x: (hlo.all(x, 1), hlo.any(x, -1), hlo.any(x, (0, 1), keep=True), hlo.all(hlo.slice(x, 0, 0, 0), 0)), x
    )
    for result, want in zip(got, (x.all(1), x.any(1), x.any(keepdims=True), x[:0].all(0)), strict=True):
        same(result, want)


def test_reduce_combines_with_any_operation(run):
    same(run(lambda x: hlo.reduce(x, "Multiply", 1, [0]), array([[2, 3], [5, 7]], "s32"))[0], array([10, 21], "s32"))


LIMITS = [
    ("max", "pred", [False, False]),
    ("min", "s64", [5, 7]),
    ("min", "u64", [5, 7]),
    ("max", "f8e4m3fn", [1, -2]),
    ("min", "f8e4m3fn", [1, -2]),
    ("max", "s64", [-(2**63), -(2**62)]),
    ("max", "s8", [-128, -128]),
    ("min", "u8", [255, 255]),
    ("min", "s32", [2**31 - 1, 2**31 - 1]),
    ("min", "pred", [True, True]),
    ("max", "f8e5m2", [-INF, -2]),
]


@pytest.mark.parametrize(("name", "dtype", "values"), LIMITS)
def test_max_and_min_start_from_the_limits_of_their_type(run, name, dtype, values):
    x = array(values, dtype)
    same(run(lambda x: getattr(hlo, name)(x, 0), x)[0], REDUCTIONS[name](x))


# Choosing and sorting.


@pytest.mark.parametrize("dtype", ["f32", "bf16", "s8", "u32", "f16"])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_argmax_is_the_first_of_equals(run, axis, dtype):
    x = array([[3, 7, 7, 0], [9, 7, 1, 0], [9, 0, 7, 0]], dtype)
    same(run(lambda x: hlo.argmax(x, axis), x)[0], x.argmax(axis).astype(np.int32))


def test_argmax_of_infinities_and_of_one(run):
    for x in (array([-INF, -INF]), array([1, INF, INF]), array([5])):
        same(run(lambda x: hlo.argmax(x, 0), x)[0], np.int32(x.argmax()))


def test_argmax_stays_inside_where_there_is_a_nan(run):
    assert run(lambda x: hlo.argmax(x, 0), array([1, NAN, 3]))[0] == 1  # as in NumPy and PyTorch


@pytest.mark.parametrize("dtype", ["f32", "bf16", "s8", "s32", "u32"])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("descending", [False, True])
def test_sort_keeps_the_order_of_equals(run, descending, axis, dtype):
    x = array([[3, 1, 2, 1], [1, 1, 9, 9], [3, 0, 2, 9]], dtype)
    ascending = x.astype(np.float64) * (-1 if descending else 1)
    order = np.argsort(ascending, axis, kind="stable")
    values, positions = run(lambda x: hlo.sort(x, axis, descending), x)
    same(values, np.take_along_axis(x, order, axis))
    same(positions, order.astype(np.int32))


def test_sort_carries_a_payload_of_another_type(run):
    x, y = array([3, 1, 2], "s32"), array([30, 10, 20], "bf16")
    got = run(lambda x, y: hlo.sort(x, payload=y), x, y)
    same(got[0], array([1, 2, 3], "s32"))
    same(got[1], array([10, 20, 30], "bf16"))


@pytest.mark.parametrize("sizes", [(1,), (0,), (3, 1)])
def test_sort_of_one_or_nothing(run, sizes):
    x = counted(*sizes)
    values, positions = run(hlo.sort, x)
    same(values, x)
    same(positions, np.zeros(sizes, np.int32))


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_sort_has_nan_as_the_largest_and_minus_zero_as_zero(run, dtype):
    x = array([1, NAN, 0.0, -INF, NAN, -0.0], dtype)
    up, down = run(lambda x: (hlo.sort(x)[1], hlo.sort(x, descending=True)[1]), x)
    assert up.tolist() == [3, 2, 5, 0, 1, 4]
    assert down.tolist() == [1, 4, 0, 2, 5, 3]


def test_sort_has_nan_as_the_largest_whatever_its_sign(run):
    # The NaN that a processor produces is negative.
    _, positions = run(hlo.sort, np.copysign(array([1, NAN, 0]), array([1, -1, 1])))
    assert positions.tolist() == [2, 0, 1]


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16", "s8", "s32", "u32"])
@pytest.mark.parametrize("k", [1, 3, 6])
def test_top_k_takes_the_first_of_equals(run, k, dtype):
    x = array([[1, 3, 3, 0, 3, 0], [5, 4, 3, 2, 1, 0], [0, 0, 0, 0, 0, 0]], dtype)
    order = np.argsort(-x.astype(np.float64), 1, kind="stable")[:, :k]
    values, positions = run(lambda x: hlo.top_k(x, k), x)
    same(values, np.take_along_axis(x, order, 1))
    same(positions, order.astype(np.int32))


def test_top_k_of_a_vector_with_infinities(run):
    values, positions = run(lambda x: hlo.top_k(x, 4), array([-INF, 2, INF, -INF, -3]))
    same(values, array([INF, 2, -3, -INF]))
    same(positions, array([2, 1, 4, 0], "s32"))
