"""The kernels of rows of integers: what is cut out of a parameter, and what a loop notes of its rows."""

from functools import partial, reduce

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from transformers_neuronx import hlo
from transformers_neuronx.compiler import compile_py_func
from transformers_neuronx.engine.loops import _advance_body, _with_tokens_body, advance, with_tokens
from transformers_neuronx.pyhlo import dtype_named
from transformers_neuronx.runtimes import get_runtime, kernels

pytestmark = pytest.mark.skipif(not kernels.built(), reason="the kernels were not built: they need a C++ compiler")
drawn = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def cut(data, x):
    """A random piece of an array, and the function that cuts the same piece of a tensor."""
    steps = []
    for _ in range(data.draw(st.integers(1, 4))):
        if data.draw(st.booleans()):
            columns = data.draw(st.sampled_from([n for n in range(1, x.size + 1) if x.size % n == 0] or [7]))
            rows = x.size // columns
            sizes = data.draw(st.sampled_from([(x.size,), (rows, columns), (rows, 1, columns)]))
            steps.append(lambda t, sizes=sizes: hlo.reshape(t, *sizes))
            x = x.reshape(sizes)
        else:
            axis = data.draw(st.integers(0, x.ndim - 1))
            first = data.draw(st.integers(0, x.shape[axis]))
            last = data.draw(st.integers(first, x.shape[axis]))
            stride = data.draw(st.sampled_from([1, 1, 1, 2]))
            steps.append(partial(hlo.slice, axis=axis, start=first, limit=last, stride=stride))
            x = x[(slice(None),) * axis + (slice(first, last, stride),)]
    return x, lambda tensor: reduce(lambda t, step: step(t), steps, tensor)


@drawn
@given(st.data(), st.sampled_from([(24,), (6, 4), (1, 12), (2, 3, 4)]))
def test_pieces_are_those_of_numpy(data, sizes):
    """Whatever is cut, and whoever uses it: results, operations, and pieces of pieces."""
    x = np.arange(np.prod(sizes), dtype=np.int32).reshape(sizes)
    pieces = [cut(data, x) for _ in range(data.draw(st.integers(1, 4)))]

    def graph(_):
        tensor = dtype_named("s32")[x.shape].Parameter(parameter_number=0)
        found = [piece(tensor) for _, piece in pieces]
        return [*found, *(each + 1 for each in found)]

    runtime = get_runtime("cpu", 1)
    results = runtime.compile(compile_py_func(graph))(runtime.put([x]))
    for got, want in zip(results, [want + more for more in (0, 1) for want, _ in pieces], strict=True):
        np.testing.assert_array_equal(got.numpy(), want)


def test_what_a_step_cuts_is_one_call(write):
    """Equal pieces are one result. Weights and single numbers are left to XLA."""

    def graph(x, y):
        rows = hlo.reshape(hlo.slice(x, 0, 2, 14), 3, 4)
        columns = [hlo.reshape(hlo.slice(rows, 1, i, i + 1), 3) for i in (0, 2, 2)]
        return [*(column * 2 for column in columns), hlo.slice(y, 0, 0, 2), hlo.reshape(hlo.slice(x, 0, 0, 1)) + 1]

    module = kernels.with_kernels(write(graph, np.zeros(20, np.int32), np.zeros(8, np.float32)))
    [called] = [each for each in module.computations[-1].instructions if each.opcode == "custom-call"]
    assert called.custom_call_target == kernels.target("cut")
    assert [list(each.dimensions) for each in called.shape.tuple_shapes] == [[3], [3], [1]]
    assert b"places = array<i64: 2, 3, 4, 1, 4, 3, 4, 1, 0, 1, 1, 1>" in called.backend_config


def taken(write, run, kernel, graph, body, *arrays):
    assert kernels.target(kernel) in str(kernels.with_kernels(write(graph, *arrays)))
    for got, want in zip(run(graph, *arrays), run(body, *arrays), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("named", [False, True])
def test_tokens_of_each_slot(write, run, named):
    """Negative ones are none. Tokens and slots that are too large count as the last ones."""
    random = np.random.default_rng(0)
    seen, tokens = random.random((6, 40)) < 0.2, np.int32([3, -1, 39, 40, -(2**31), 0])
    slots = [np.int32([5, 1, 1, 7, 0, -3])] if named else []
    taken(
        write,
        run,
        "with_tokens",
        lambda *x: [with_tokens(*x)],
        lambda *x: [_with_tokens_body(*x)],
        seen,
        tokens,
        *slots,
    )


@pytest.mark.parametrize("named", [False, True])
def test_tokens_at_once(write, run, named):
    seen, tokens = np.random.default_rng(0).random((6, 40)) < 0.2, np.int32([3, -1, 39, 0, -(2**31), 7])
    arrays = seen, tokens, *([np.int32([5, 1, 1, 0, 0, 2])] if named else [])
    graphs = (lambda *x, f=f: [f(*x, at_once=True)] for f in (with_tokens, _with_tokens_body))
    taken(write, run, "with_tokens", *graphs, *arrays)


@pytest.mark.parametrize("at", [0, 3, 9])
def test_rows_that_go_on_and_that_end(write, run, at):
    """They end with their last token, an end-of-sequence token, or none at all; then nothing is noted."""
    sampled, token = np.int32([7, 8, 9, -2, 7, 5]), np.int32([1, 2, 3, 4, 5, 6])
    left, eos = np.int32([3, 1, 2, 2, 0, -(2**31)]), np.int32([[-1, -1], [-1, -1], [4, 9], [-1, -1], [7, -1], [5, 5]])
    arrays = sampled, token, left, eos, np.int32(at), np.full((6, 4), -1, np.int32)
    taken(write, run, "advance", lambda *x: [*advance(*x)], lambda *x: [*_advance_body(*x)], *arrays)
    found, last, rest, tokens = run(lambda *x: [*advance(*x)], *arrays)
    assert found.tolist() == [7, 8, 9, -2, -1, -1] == tokens[:, min(at, 3)].tolist()
    assert last.tolist() == [7, 8, 9, 4, 5, 6] and rest.tolist() == [2, 0, 0, 0, 0, 0]
