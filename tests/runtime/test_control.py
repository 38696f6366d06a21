"""Composites, loops and conditions: the module that is written, and that it computes the same as Python."""

import json
from typing import NamedTuple

import numpy as np
import pytest

from transformers_neuronx import hlo
from transformers_neuronx.hlo.control import COMPOSITE_ATTRIBUTES, COMPOSITE_NAME, COMPOSITE_OPERANDS, composite_call
from transformers_neuronx.runtimes import get_runtime

X = np.array([1, 2, 3], np.float32)


def scaled(x, y, by):
    return x * by + y


scale = hlo.composite("scale", scaled)


def calls(module):
    """Return the calls of the entry computation, and the computations by their ids."""
    entry = module.computations[-1].instructions
    return [i for i in entry if i.opcode == "call"], {c.id: c for c in module.computations}


def body_of(call, computations):
    return computations[call.called_computation_ids[0]]


class Pair(NamedTuple):
    first: hlo.Tensor
    second: hlo.Tensor | None = None


def test_a_composite_is_a_call_that_says_its_name_operands_and_attributes(write):
    module = write(lambda x: scale(x, x, by=2.0), X)
    ((call,), computations) = calls(module)
    attributes = call.frontend_attributes.map
    assert attributes[COMPOSITE_NAME] == "scale" == call.metadata.op_name
    assert attributes[COMPOSITE_OPERANDS] == "x y"
    assert json.loads(attributes[COMPOSITE_ATTRIBUTES]) == {"by": 2.0}
    assert composite_call(call) == ("scale", dict(zip("xy", call.operand_ids, strict=True)), {"by": 2.0})
    assert composite_call(body_of(call, computations).instructions[0]) is None
    body = body_of(call, computations)
    assert [i.opcode for i in body.instructions] == [
        "parameter",
        "parameter",
        "constant",
        "broadcast",
        "multiply",
        "add",
    ]


@pytest.mark.parametrize("positional", [True, False])
def test_operands_may_be_groups_and_may_be_absent(write, run, positional):
    def body(x, pairs, more, left=None, right=None, *, by, times=None):
        assert left is None and times is None
        sums = [pair.first if pair.second is None else pair.first + pair.second for pair in pairs]
        return sum(sums[1:], sums[0]) * x + sum(more[1:], more[0]) * by - right

    def graph(x, y):
        pairs, more = [Pair(x, y), Pair(y)], (x, y)
        if positional:
            return hlo.composite("grouped", body)(x, pairs, more, None, y, by=2.0)
        return hlo.composite("grouped", body)(right=y, by=2.0, more=more, pairs=pairs, x=x)

    ((call,), _) = calls(write(graph, X, X))
    said = call.frontend_attributes.map
    assert said[COMPOSITE_OPERANDS] == "x pairs.0.first pairs.0.second pairs.1.first more.0 more.1 right"
    assert json.loads(said[COMPOSITE_ATTRIBUTES]) == {"by": 2.0, "times": None}
    y = X + 1
    np.testing.assert_array_equal(run(graph, X, y)[0], (X + y + y) * X + (X + y) * 2 - y)


def test_operands_of_other_names_have_bodies_of_their_own(run):
    either = hlo.composite("either", lambda x, plus=None, minus=None: x - minus if plus is None else x + plus)
    plus, minus = run(lambda x: (either(x, x), either(x, minus=x)), X)
    np.testing.assert_array_equal([plus, minus], [2 * X, 0 * X])


def test_attributes_are_json_whose_keys_are_in_order(write):
    anything = hlo.composite("anything", lambda x, **attributes: x)
    module = write(lambda x: anything(x, z=None, a=[1, (2.5, "é")], m={"k": True}), X)
    text = calls(module)[0][0].frontend_attributes.map[COMPOSITE_ATTRIBUTES]
    assert text.startswith('{"a": ')
    assert json.loads(text) == {"a": [1, [2.5, "é"]], "m": {"k": True}, "z": None}


def test_equal_uses_share_one_body_and_others_have_their_own(write):
    def graph(x):
        y = scale(scale(x, x, by=2.0), x, by=2.0)
        return scale(y, y, by=3.0), scale(hlo.slice(y, 0, 0, 2), hlo.slice(x, 0, 0, 2), by=2.0)

    found, computations = calls(write(graph, X))
    bodies = [call.called_computation_ids[0] for call in found]
    assert bodies[0] == bodies[1]
    assert len(set(bodies)) == 3 == len(computations) - 1


def test_a_composite_computes_what_its_body_does_inline(run):
    inline, composed = run(lambda x, y: (scaled(x, y, 2.5), scale(x, y, by=2.5)), X, -X)
    np.testing.assert_array_equal(inline, composed)
    np.testing.assert_array_equal(composed, 1.5 * X)


def test_a_composite_may_be_made_of_composites_and_return_several(run, write):
    both = hlo.composite("both", lambda x, by: (scale(x, x, by=by), hlo.sum(scale(x, x, by=by), 0)))

    def graph(x):
        vector, total = both(x, by=4.0)
        return vector, total, scale(x, x, by=4.0)

    module = write(graph, X)
    names = [
        i.frontend_attributes.map[COMPOSITE_NAME]
        for c in module.computations
        for i in c.instructions
        if i.opcode == "call"
    ]
    assert sorted(names) == ["both", "scale", "scale", "scale"]
    assert sum("scale" in c.name for c in module.computations) == 1
    for got, want in zip(run(graph, X), (5 * X, 30, 5 * X), strict=True):
        np.testing.assert_array_equal(got, want)


def test_two_bodies_of_one_name_are_two_bodies(run):
    def graph(x):
        return hlo.composite("step", lambda x: x + 1.0)(x), hlo.composite("step", lambda x: x * 10.0)(x)

    plus, times = run(graph, X)
    np.testing.assert_array_equal(plus, X + 1)
    np.testing.assert_array_equal(times, X * 10)


def test_a_runtime_without_a_kernel_of_that_name_inlines_the_body(write):
    program = get_runtime("cpu", 1).compile(write(lambda x: scale(scale(x, x, by=2.0), x, by=2.0), X)).text()
    assert "multiply" in program
    assert "call(" not in program


@pytest.mark.parametrize(("limit", "rounds"), [(10, 10), (1, 1), (0, 0), (-3, 0)])
def test_while_loop_runs_while_its_condition_holds(run, limit, rounds):
    def graph(limit, x):
        def body(i, limit, x):
            return i + 1, limit, scale(x, x, by=1.0)

        return hlo.while_loop(lambda i, limit, x: i < limit, body, [hlo.constant(0, "s32"), limit, x])

    i, _, x = run(graph, np.int32(limit), X)
    assert i == rounds
    np.testing.assert_array_equal(x, X * 2**rounds)


def test_loops_nest_and_carry_several_types(run):
    def graph(x):
        zero = hlo.constant(0, "s32")

        def inner(j, i, n, x):
            return j + 1, i, n + 1, -x

        def outer(i, n, x):
            _, _, n, x = hlo.while_loop(lambda j, i, n, x: j < i, inner, [i * 0, i, n, x])
            return i + 1, n, x

        return hlo.while_loop(lambda i, n, x: i < 5, outer, [zero, zero, x])

    i, n, x = run(graph, X)
    assert (i, n) == (5, 0 + 1 + 2 + 3 + 4)
    np.testing.assert_array_equal(x, X)


@pytest.mark.parametrize("predicate", [True, False])
def test_conditional_runs_one_of_its_branches(run, predicate):
    def graph(p, x, y):
        return hlo.conditional(p, lambda x, y: scale(x, y, by=2.0), lambda x, y: x / y, x, y)

    with np.errstate(divide="ignore"):
        want = 2 * X + 0 if predicate else X / np.zeros(3, np.float32)
    np.testing.assert_array_equal(run(graph, np.bool_(predicate), X, np.zeros(3, np.float32))[0], want)


def test_conditional_wants_no_operands(run):
    one, two = (lambda number=number: hlo.constant(number, "s32") for number in (1, 2))
    assert [run(lambda p: hlo.conditional(p, one, two), np.bool_(p))[0] for p in (True, False)] == [1, 2]


def test_branches_and_loops_use_what_is_around_them(run):
    """They may use values from two levels further out, and only used values are passed in."""

    def graph(p, x, y):
        double = x + x

        def body(i, total):
            chosen = hlo.conditional(p, lambda: scale(double, y, by=2.0) + hlo.convert(i, "f32"), lambda: total - y)
            return i + 1, total + chosen

        return hlo.while_loop(lambda i, total: i < 3, body, [hlo.constant(0, "s32"), double])

    y = np.full(3, 0.5, np.float32)
    for predicate in (True, False):
        total = 2 * X
        for i in range(3):
            total = total + (4 * X + y + i if predicate else total - y)
        np.testing.assert_allclose(run(graph, np.bool_(predicate), X, y)[1], total, rtol=1e-6)


@pytest.mark.parametrize("predicate", [True, False])
def test_what_is_around_may_be_the_result(run, predicate):
    def graph(p, x, y):
        _, a, b = hlo.while_loop(lambda i, a, b: i < 2, lambda i, a, b: [i + 1, y, a], [hlo.constant(0, "s32"), x, x])
        return hlo.conditional(p, lambda: x, lambda: y), a, b

    chosen, a, b = run(graph, np.bool_(predicate), X, -X)
    np.testing.assert_array_equal(chosen, X if predicate else -X)
    np.testing.assert_array_equal([a, b], [-X, -X])
