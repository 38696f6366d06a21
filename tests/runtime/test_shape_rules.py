"""The shapes that a graph has before it is compiled are NumPy's, and so are the elements that XLA computes then.

Operands are random: hypothesis draws sizes, with zeros among them, and axes.
"""

import numpy as np
from hypothesis import HealthCheck, given, settings, strategies as st

from transformers_neuronx import hlo
from transformers_neuronx.compiler import compile_py_func
from transformers_neuronx.pyhlo import dtype_named
from transformers_neuronx.pyhlo.dtypes import from_numpy
from transformers_neuronx.runtimes import get_runtime

SIZE = st.integers(0, 4)
SIZES = st.lists(SIZE, min_size=1, max_size=4)
DTYPES = st.sampled_from(["float32", "int32", "int8", "bool"])
NUMERIC = st.sampled_from(["float32", "int32"])
drawn = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def numbers(sizes, dtype="float32"):
    """As many different numbers as the type has."""
    return (np.arange(np.prod(sizes, dtype=int)) % 120).reshape(sizes).astype(dtype)


def same(function, wanted, *arrays):
    """Assert that a graph has the shape and the type of `wanted`, and computes it."""
    seen = []

    def graph(scribe):
        shapes = [dtype_named(from_numpy(array.dtype).name)[array.shape] for array in arrays]
        seen.append(function(*(shape.Parameter(parameter_number=i) for i, shape in enumerate(shapes))))
        return [seen[0]]

    module = compile_py_func(graph)
    assert (seen[0].sizes, seen[0].dtype.element.numpy) == (wanted.shape, wanted.dtype)
    runtime = get_runtime("cpu", 1)
    [got] = runtime.compile(module)(*(runtime.put([array]) for array in arrays))
    np.testing.assert_array_equal(got.numpy(), wanted)


def axis_of(data, sizes):
    """An axis, counted from the front or from the back."""
    return data.draw(st.integers(-len(sizes), len(sizes) - 1))


def axes_of(data, sizes, least=0):
    return data.draw(st.lists(st.sampled_from(range(len(sizes))), min_size=least, unique=True))


@drawn
@given(st.data(), SIZES, NUMERIC)
def test_elementwise_operations_broadcast(data, sizes, dtype):
    other = [data.draw(st.sampled_from([size, 1])) for size in sizes]
    other = other[data.draw(st.integers(0, len(sizes))) :]
    a, b = numbers(sizes, dtype), numbers(other, dtype)
    same(hlo.add, a + b, a, b)
    same(lambda x, y: hlo.less(y, x), b < a, a, b)
    same(lambda x, y: hlo.select(hlo.less(x, y), x, y), np.where(a < b, a, b), a, b)


@drawn
@given(st.data(), SIZES, DTYPES)
def test_axes_are_moved(data, sizes, dtype):
    x = numbers(sizes, dtype)
    order = data.draw(st.permutations(range(len(sizes))))
    same(lambda t: hlo.transpose(t, *order), np.transpose(x, order), x)
    chosen = axes_of(data, sizes)
    same(lambda t: hlo.reverse(t, *chosen), np.flip(x, chosen), x)
    lead = data.draw(st.lists(SIZE, max_size=2))
    same(lambda t: hlo.broadcast_to(t, [*lead, *sizes]), np.broadcast_to(x, [*lead, *sizes]), x)


@drawn
@given(st.data(), SIZES, DTYPES)
def test_sizes_are_changed(data, sizes, dtype):
    x = numbers(sizes, dtype)
    at = data.draw(st.integers(0, len(sizes)))
    merged = [*sizes[:at], int(np.prod(sizes[at:], dtype=int))]
    same(lambda t: hlo.reshape(t, *merged), x.reshape(merged), x)
    if np.prod(merged[:-1]):
        same(lambda t: hlo.reshape(t, *merged[:-1], -1), x.reshape(merged), x)
    axis, low, high = axis_of(data, sizes), *data.draw(st.tuples(SIZE, SIZE))
    widths = [(low, high) if i == axis % len(sizes) else (0, 0) for i in range(len(sizes))]
    same(lambda t: hlo.pad(t, axis, low, high), np.pad(x, widths), x)


@drawn
@given(st.data(), SIZES, DTYPES)
def test_parts_are_taken(data, sizes, dtype):
    x, axis = numbers(sizes, dtype), axis_of(data, sizes)
    size = sizes[axis]
    start = data.draw(st.integers(0, size))
    limit, stride = data.draw(st.tuples(st.integers(start, size), st.integers(1, 3)))
    wanted = np.moveaxis(np.moveaxis(x, axis, 0)[start:limit:stride], 0, axis)
    same(lambda t: hlo.slice(t, axis, start, limit, stride), wanted, x)
    starts = data.draw(st.tuples(*(st.integers(-2, each + 2) for each in sizes)))
    block = data.draw(st.tuples(*(st.integers(0, each) for each in sizes)))
    moved = [min(max(at, 0), each - want) for at, each, want in zip(starts, sizes, block, strict=True)]
    inside = tuple(slice(at, at + want) for at, want in zip(moved, block, strict=True))
    same(lambda t: hlo.dynamic_slice(t, starts, block), x[inside], x)
    updated, update = x.copy(), np.ones(block, x.dtype)
    updated[inside] = update
    same(lambda t, u: hlo.dynamic_update_slice(t, u, starts), updated, x, update)


@drawn
@given(st.data(), SIZES, DTYPES, st.integers(1, 3))
def test_tensors_are_joined_and_split(data, sizes, dtype, count):
    axis = axis_of(data, sizes)
    parts = []
    for _ in range(count):
        own = list(sizes)
        own[axis] = data.draw(SIZE)
        parts.append(numbers(own, dtype))
    same(lambda *t: hlo.concatenate(t, axis), np.concatenate(parts, axis), *parts)
    x = np.concatenate([parts[0]] * count, axis)
    for i, wanted in enumerate(np.split(x, count, axis)):
        same(lambda t, i=i: hlo.split(t, count, axis)[i], wanted, x)


@drawn
@given(st.data(), SIZES, DTYPES, st.lists(SIZE, max_size=2))
def test_indices_look_up(data, sizes, dtype, count):
    axis = axis_of(data, sizes)
    sizes[axis] += 1
    x = numbers(sizes, dtype)
    indices = np.array(
        data.draw(st.lists(st.integers(-2, 9), min_size=(n := int(np.prod(count))), max_size=n)), np.int32
    )
    indices = indices.reshape(count)
    wanted = np.take(x, np.clip(indices, 0, sizes[axis] - 1), axis)
    same(lambda t, i: hlo.take(t, i, axis), wanted, x, indices)


@drawn
@given(st.data(), SIZES, NUMERIC, st.booleans())
def test_reductions(data, sizes, dtype, keep):
    x, axes = numbers(sizes, dtype), axes_of(data, sizes)
    same(lambda t: hlo.sum(t, axes, keep), x.sum(tuple(axes), x.dtype, keepdims=keep), x)
    axis = axis_of(data, sizes)
    if sizes[axis]:
        same(lambda t: hlo.max(t, axis, keep), x.max(axis, keepdims=keep), x)
        same(lambda t: hlo.argmax(-t, axis), np.argmax(-x, axis).astype(np.int32), x)
    same(lambda t: hlo.sort(-t, axis)[0], np.sort(-x, axis), x)


@drawn
@given(st.data(), st.integers(0, 2), st.integers(0, 2), st.integers(0, 2), st.integers(0, 2), NUMERIC)
def test_dot(data, batches, contracted, free_a, free_b, dtype):
    """As einsum has it, for axes in any order."""
    letters = iter("abcdefgh")
    batch, contract, left, right = ([next(letters) for _ in range(n)] for n in (batches, contracted, free_a, free_b))
    size = {letter: data.draw(SIZE) for letter in [*batch, *contract, *left, *right]}
    of_a, of_b = (data.draw(st.permutations([*batch, *contract, *free])) for free in (left, right))
    a, b = (numbers([size[letter] for letter in letters], dtype) for letters in (of_a, of_b))
    axes = [[[letters.index(letter) for letter in chosen] for letters in (of_a, of_b)] for chosen in (contract, batch)]
    free = [letter for letter in [*of_a, *of_b] if letter in (*left, *right)]
    wanted = np.einsum(f"{''.join(of_a)},{''.join(of_b)}->{''.join([*batch, *free])}", a, b)
    same(lambda x, y: hlo.dot(x, y, *axes), np.asarray(wanted, a.dtype), a, b)


@drawn
@given(st.data(), SIZES, NUMERIC, st.sampled_from(["Add", "Minimum", "Maximum"]))
def test_updates_are_combined(data, sizes, dtype, op):
    """Places may come several times, and outside."""
    x = numbers(sizes, dtype)
    axes = axes_of(data, sizes, least=1)
    count = data.draw(SIZE)
    places = [[data.draw(st.integers(-1, sizes[axis])) for axis in axes] for _ in range(count)]
    places = np.array(places, np.int32).reshape(count, len(axes))
    rest = [size for axis, size in enumerate(sizes) if axis not in axes]
    updates = 60 - 7 * numbers([count, *rest], dtype)
    want = x.copy()
    view = np.moveaxis(want, axes, range(len(axes)))
    for place, update in zip(places, updates, strict=True):
        if all(0 <= at < sizes[axis] for at, axis in zip(place, axes, strict=True)):
            view[tuple(place)] = getattr(np, op.lower())(view[tuple(place)], update)
    same(lambda t, i, u: hlo.scatter_rows(t, i, u, axes, op), want, x, places, updates)


WINDOW = st.tuples(st.integers(1, 3), st.integers(1, 3), st.tuples(SIZE, SIZE), st.integers(1, 2))


@drawn
@given(st.data(), SIZES, NUMERIC, st.sampled_from([("Add", 0), ("Maximum", -1000)]))
def test_windows_are_reduced(data, sizes, dtype, how):
    """A window has a size, a stride, edges before and after, and a dilation for each of the last axes."""
    op, initial = how
    x = numbers(sizes, dtype)
    windows = data.draw(st.lists(WINDOW, min_size=1, max_size=len(sizes)))
    kernel, stride, edges, dilation = zip(*windows, strict=True)
    lead = len(sizes) - len(windows)
    want = np.pad(x, [(0, 0)] * lead + list(edges), constant_values=initial)
    for axis, (size, step, _, apart) in enumerate(windows, lead):
        reach = (size - 1) * apart + 1
        starts = range(0, max(want.shape[axis] - reach + 1, 0), step)
        parts = [want.take(range(start, start + reach, apart), axis) for start in starts]
        reduced = [getattr(np, op.lower()).reduce(part, axis) for part in parts]
        empty = np.zeros([*want.shape[:axis], 0, *want.shape[axis + 1 :]], want.dtype)
        want = np.stack(reduced, axis) if reduced else empty
    same(lambda t: hlo.reduce_window(t, op, initial, kernel, stride, edges, dilation), want.astype(dtype), x)
