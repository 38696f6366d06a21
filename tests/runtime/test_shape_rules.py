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
