"""Layers that keep states: bodies and kernels against NumPy, for each instruction set of the processor."""

import numpy as np
import pytest
from levels import at_every_level

from transformers_neuronx.layers.convolution import _short_convolution_body, short_convolution
from transformers_neuronx.layers.delta_net import EPS, _gated_delta_rule_body, gated_delta_rule
from transformers_neuronx.layers.mamba import _selective_scan_body, selective_scan
from transformers_neuronx.pyhlo.dtypes import element_type
from transformers_neuronx.runtimes import get_runtime, kernels

pytestmark = pytest.mark.skipif(not kernels.built(), reason="the kernels were not built: they need a C++ compiler")

# Sequences of a step: first token, number of tokens, position of the first, places of the states before and after.
STEPS = {
    "rows": (True, (3, 4), [[0, 4, 0, 2, 2], [4, 1, 7, 0, 0], [8, 0, 3, 1, 1]]),
    "one row of one token": (True, (1, 1), [[0, 1, 5, 3, 3]]),
    "tokens": (False, (9, 1), [[0, 5, 0, 1, 1], [5, 1, 7, 2, 0], [6, 0, 3, 3, 3], [6, 2, 9, 3, 4]]),
}
PLACES = 5
# Features and taps; key heads, heads, features of keys and of values: whole vectors and parts of them.
FEATURES = [(64, 4), (7, 2), (133, 9)]
HEADS = [(2, 4, 32, 64), (1, 3, 7, 5), (3, 3, 130, 33), (1, 1, 1, 1)]
RULES = {
    "gated_delta_rule": (gated_delta_rule, _gated_delta_rule_body),
    "selective_scan": (selective_scan, _selective_scan_body),
}


def draw(*sizes, seed=0):
    return np.random.default_rng([seed, *sizes]).standard_normal(sizes).astype(np.float32)


def tokens_of(table):
    """Yield for each sequence with tokens: whether it begins, its places, and the numbers of its tokens."""
    for first, count, start, before, after in table:
        if count:
            yield start == 0, before, after, range(first, first + count)


def convolved(x, weight, table, state, bias=0, *, activation, together):
    rows, n, c = x.shape
    x, y, state = x.reshape(-1, c).astype(np.float64), np.zeros((rows * n, c)), state.astype(np.float64)
    for fresh, before, after, numbers in tokens_of(table):
        window = np.zeros_like(state[before]) if fresh else state[before]
        for token in numbers:
            window = np.concatenate([window, x[token : token + 1]])
            total = (window * weight).sum(0) + bias
            y[token] = total / (1 + np.exp(-total)) if activation else total
            window = window[1:]
        state[after] = window
    return y, state


def attended(q, k, v, decay, beta, table, memory, delta):
    """Linear attention, by the delta rule or as Mamba-2 does it: then queries and keys are as they are."""
    *_, key_heads, d = q.shape
    *_, heads, e = v.shape
    q, k = (x.reshape(-1, key_heads, d).astype(np.float64) for x in (q, k))
    if delta:
        q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + EPS) for x in (q, k))
        q = q / np.sqrt(d)
    q, k = (np.repeat(x, heads // key_heads, 1) for x in (q, k))
    v, decay, beta = v.reshape(-1, heads, e), decay.reshape(-1, heads), beta.reshape(-1, heads)
    y, memory = np.zeros(v.shape), memory.astype(np.float64)
    for fresh, before, after, numbers in tokens_of(table):
        now = np.zeros_like(memory[before]) if fresh else memory[before]
        for token in numbers:
            now = now * np.exp(decay[token])[:, None, None]
            known = np.einsum("hde,hd->he", now, k[token]) if delta else 0
            now = now + np.einsum("hd,he,h->hde", k[token], v[token] - known, beta[token])
            y[token] = np.einsum("hde,hd->he", now, q[token])
        memory[after] = now
    return y, memory


def convolution_of(step, features, dtype="f32"):
    together, (rows, n), table = STEPS[step]
    c, size = features
    x = draw(rows, n, c).astype(element_type(dtype).numpy)
    state = draw(PLACES, size - 1, c, seed=2)
    biases = [draw(c, seed=3)] if c % 2 else []  # some convolutions have one, and some no activation
    operands = [x, draw(size, c, seed=1), np.array(table, np.int32), state, *biases]
    return operands, dict(together=together, activation=None if size == 2 else "silu")


def rule_of(step, heads):
    together, (rows, n), table = STEPS[step]
    key_heads, count, d, e = heads
    q, k, v = draw(rows, n, key_heads, d), draw(rows, n, key_heads, d, seed=1), draw(rows, n, count, e, seed=2)
    decay, beta = -np.abs(draw(rows, n, count, seed=3)), 1 / (1 + np.exp(draw(rows, n, count, seed=4)))
    memory = draw(PLACES, count, d, e, seed=5)
    return [q, k, v, decay, beta, np.array(table, np.int32), memory], dict(together=together)


def check(results, wanted, table, tolerance=2e-6):
    """Compare the tokens of sequences, and all states."""
    y, state = results
    real = [token for *_, numbers in tokens_of(table) for token in numbers]
    for found, right in ((y.reshape(wanted[0].shape)[real], wanted[0][real]), (state, wanted[1])):
        if right.size:
            assert np.abs(found - right).max() <= tolerance * max(np.abs(right).max(), 1)


def compiled(write, name, call, operands, attributes):
    program = get_runtime("cpu", 1).compile(write(lambda *tensors: call(*tensors, **attributes), *operands))
    assert program.text().count(f'"{kernels.target(name)}"') == 1
    return program


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("features", FEATURES, ids=str)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.few(12)
def test_convolutions(write, step, features, dtype):
    operands, attributes = convolution_of(step, features, dtype)
    wanted = convolved(operands[0].astype(np.float32), *operands[1:], **attributes)
    program = compiled(write, "short_convolution", short_convolution, operands, attributes)
    for results in at_every_level(program, *operands):
        check(results, wanted, operands[2])


@pytest.mark.parametrize("features", FEATURES, ids=str)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.few(4)
def test_the_body_of_convolutions_means_the_same(run, step, features):
    operands, attributes = convolution_of(step, features)
    results = run(lambda *tensors: _short_convolution_body(*tensors, **attributes), *operands)
    check(results, convolved(*operands, **attributes), operands[2])


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.few(12)
def test_linear_attention(write, step, heads, name):
    operands, attributes = rule_of(step, heads)
    program = compiled(write, name, RULES[name][0], operands, attributes)
    for results in at_every_level(program, *operands):
        check(results, attended(*operands, name == "gated_delta_rule"), operands[5])


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.few(8)
def test_the_body_of_linear_attention_means_the_same(run, step, heads, name):
    operands, attributes = rule_of(step, heads)
    results = run(lambda *tensors: RULES[name][1](*tensors, **attributes), *operands)
    check(results, attended(*operands, name == "gated_delta_rule"), operands[5])


def test_bits_do_not_depend_on_how_a_sequence_is_divided_into_steps(write):
    """Seven tokens at once, and as four and three, in other places and beside another sequence."""
    calls = {"short_convolution": short_convolution} | {name: call for name, (call, _) in RULES.items()}
    for name, call in calls.items():
        shapes = (7, 1, 2, 40), (7, 1, 2, 40), (7, 1, 4, 20), (7, 1, 4), (7, 1, 4)
        inputs, fixed, last = [draw(*shape, seed=seed) for seed, shape in enumerate(shapes)], [], []
        inputs[3] = -np.abs(inputs[3])
        state, how = draw(PLACES, 4, 40, 20, seed=9), dict(together=False)
        if name == "short_convolution":
            inputs, fixed, last = [draw(7, 1, 33)], [draw(4, 33)], [draw(33, seed=3)]
            state, how = draw(PLACES, 3, 33, seed=9), how | dict(activation="silu")

        def results(parts, table, state, name=name, call=call, fixed=fixed, last=last, how=how):
            operands = [*parts, *fixed, np.array(table, np.int32), state, *last]
            program = compiled(write, name, call, operands, how)
            return list(at_every_level(program, *operands))

        whole = results(inputs, [[0, 7, 3, 1, 1]], state)
        for number, (y, after) in enumerate(whole):
            first = results([part[:4] for part in inputs], [[0, 4, 3, 1, 2]], state)[number]
            rest = [np.concatenate([part[:2], part[4:]]) for part in inputs]
            second = results(rest, [[0, 2, 0, 0, 0], [2, 3, 7, 2, 4]], first[1])[number]
            assert np.array_equal(y, np.concatenate([first[0], second[0][2:]]))
            assert np.array_equal(after[1], second[1][4])


def test_places_that_are_none_are_left_alone(write):
    operands, attributes = convolution_of("tokens", (16, 4))
    operands[2] = np.array([[0, 3, 2, -1, 0], [3, 2, 0, 1, PLACES], [5, 90, 1, 0, 0]], np.int32)
    program = compiled(write, "short_convolution", short_convolution, operands, attributes)
    for y, state in at_every_level(program, *operands):
        assert not y[:5].any() and y[5:].any()
        assert np.array_equal(state[1:], operands[3][1:]) and not np.array_equal(state[0], operands[3][0])
