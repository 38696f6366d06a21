"""The attention composite against NumPy: what it returns for real tokens, and the cache it leaves behind."""

from functools import partial

import numpy as np
import pytest

from transformers_neuronx.pyhlo.dtypes import element_type
from transformers_neuronx.runtimes import get_runtime, kernels

HEADS, KV_HEADS, D = 6, 2, 4
POSITIONS = 12
NAN = float("nan")


def attention(at_once=False):
    pytest.importorskip("torch", reason="layers name weights, which are loaded with torch")
    from transformers_neuronx.layers.attention import _attend, _attend_body

    return partial(_attend_body, scatters=True) if at_once else _attend


def in_order(function):
    def attend(q, k, v, keys, values, start, length, *slots, **attributes):
        return function(q, k, v, start, length, (keys, values), *slots, **attributes)

    return attend


@pytest.fixture(scope="module")
def attend():
    return in_order(attention())


@pytest.fixture(scope="module", params=[False, True], ids=["row by row", "at once"])
def attends(request):
    """Attention that writes to caches as on the CPU, and as on GPUs."""
    return in_order(attention(request.param))


def inputs(starts, lengths, n, slots=None, dtype="f32", cache_slots=None):
    """Return q, k, v, keys, values, start, length and perhaps slots, as `_attend` takes them, with a full cache."""
    random = np.random.default_rng(len(starts) + n)
    b = len(starts)
    cache = [(cache_slots or b) * KV_HEADS, POSITIONS, D]
    sizes = [[b, n, HEADS, D], [b, n, KV_HEADS, D], [b, n, KV_HEADS, D], cache, cache]
    numbers = [random.standard_normal(size).astype(element_type(dtype).numpy) for size in sizes]
    return [*numbers, *(np.array(x, np.int32) for x in (starts, lengths, slots) if x is not None)]


def reference(q, k, v, keys, values, start, length, slots=None, scale=0.5, sinks=None):
    """Compute token by token the context [b, n, heads, d], NaN for padding, and the caches."""
    slots = np.arange(len(q)) if slots is None else slots
    keys, values = (x.copy().reshape(-1, KV_HEADS, *x.shape[1:]) for x in (keys, values))
    context = np.full(q.shape, NAN)
    for row, slot in enumerate(slots):
        for token in range(length[row]):
            at = start[row] + token
            keys[slot, :, at], values[slot, :, at] = k[row, token], v[row, token]
            for head in range(HEADS):
                seen = [x[slot, head * KV_HEADS // HEADS, : at + 1].astype(np.float64) for x in (keys, values)]
                scores = seen[0] @ q[row, token, head].astype(np.float64) * scale
                scores = scores if sinks is None else np.append(scores, sinks[head])
                weights = np.exp(scores - scores.max())
                context[row, token, head] = weights[: at + 1] / weights.sum() @ seen[1]
    return context, *(x.reshape(-1, POSITIONS, D) for x in (keys, values))


def enough(starts, lengths, n, **_):
    """Return the smallest width that a bucket may have."""
    return max(n, *(start + length for start, length in zip(starts, lengths, strict=True)))


def check(run, attend, arrays, width, tolerance=1e-5):
    context, keys, values = run(lambda *tensors: attend(*tensors, width=width, scale=0.5), *arrays)
    wanted, want_keys, want_values = reference(*arrays)
    assert context.dtype == arrays[0].dtype
    real = ~np.isnan(wanted)
    np.testing.assert_allclose(context.astype(np.float64)[real], wanted[real], tolerance, tolerance)
    for got, want in ((keys, want_keys), (values, want_values)):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got.astype(np.float64), want.astype(np.float64))


CASES = dict(
    one_token=dict(starts=[7], lengths=[1], n=1),
    a_prompt=dict(starts=[0], lengths=[5], n=5),
    a_padded_prompt=dict(starts=[0], lengths=[3], n=8),
    the_first_and_the_last_position=dict(starts=[0, 11], lengths=[1, 1], n=1),
    unequal_starts_one_token=dict(starts=[2, 0, 7], lengths=[1, 1, 1], n=1),
    unequal_starts_and_lengths=dict(starts=[0, 3, 1], lengths=[4, 1, 2], n=4),
    a_whole_cache=dict(starts=[0, 0], lengths=[12, 5], n=12),
    rows_of_no_token=dict(starts=[4, 2], lengths=[0, 0], n=3),
    a_row_of_no_token_beside_others=dict(starts=[5, 0, 3], lengths=[2, 0, 1], n=2),
    no_token_one_wide=dict(starts=[5, 6], lengths=[0, 1], n=1),
    blocks_that_stick_out=dict(starts=[10, 11, 4], lengths=[2, 1, 4], n=4),
    a_row_that_is_full=dict(starts=[12, 3], lengths=[0, 1], n=1),
    a_row_that_is_full_of_a_window=dict(starts=[12, 3], lengths=[0, 4], n=4),
    slots_backwards=dict(starts=[2, 0, 5], lengths=[1, 1, 1], n=1, slots=[2, 1, 0]),
    some_of_the_slots=dict(starts=[3, 1], lengths=[2, 3], n=3, slots=[4, 1], cache_slots=5),
    some_of_the_slots_sticking_out=dict(starts=[9, 10], lengths=[3, 0], n=4, slots=[0, 3], cache_slots=4),
)


@pytest.mark.parametrize("case", CASES)
def test_attention_over_the_whole_cache(run, attends, case):
    check(run, attends, inputs(**CASES[case]), POSITIONS)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("at_once", [False, True])
def test_sinks_take_their_share(run, case, at_once):
    arrays, sinks = inputs(**CASES[case]), np.array([40, 3, 0.5, -1, -40, -np.inf], np.float32)
    attend = in_order(attention(at_once))
    wanted, *_ = reference(*arrays, sinks=sinks)
    context, *_ = run(lambda sinks, *x: attend(*x, width=POSITIONS, scale=0.5, sinks=sinks), sinks, *arrays)
    real = ~np.isnan(wanted)
    np.testing.assert_allclose(context[real], wanted[real], 1e-5, 1e-5)


@pytest.mark.parametrize("case", ["unequal_starts_one_token", "blocks_that_stick_out", "some_of_the_slots"])
def test_attention_in_bf16(run, attends, case):
    for width in {POSITIONS, enough(**CASES[case])}:
        check(run, attends, inputs(**CASES[case], dtype="bf16"), width, 2e-2)


@pytest.mark.parametrize("case", CASES)
def test_attention_over_as_little_of_the_cache_as_will_do(run, attends, case):
    check(run, attends, inputs(**CASES[case]), enough(**CASES[case]))


@pytest.mark.parametrize("case", ["unequal_starts_and_lengths", "blocks_that_stick_out", "some_of_the_slots"])
@pytest.mark.parametrize("width", [None, POSITIONS])
@pytest.mark.parametrize("at_once", [False, True])
def test_a_cache_of_whole_numbers_and_scales(run, case, width, at_once):
    attend = attention(at_once)

    def stored(x):
        scale = np.abs(x).max(-1, keepdims=True) / np.float32(127)
        return np.rint(x / np.where(scale == 0, 1, scale)).astype(np.int8), scale

    q, k, v, keys, values, *rows = inputs(**CASES[case])
    keys[0, 0] = k[0, 0] = 0
    cache = [part for parts in zip(stored(keys), stored(values), strict=True) for part in parts]
    attributes = dict(width=width or enough(**CASES[case]), scale=0.5)
    context, *after = run(lambda *x: attend(*x[:5], x[-4:], *x[5:-4], **attributes), q, k, v, *rows, *cache)
    numbers = [np.multiply(*stored(x)).astype(np.float32) for x in (k, v)]
    wanted, want_keys, want_values = reference(q, *numbers, *(cache[i] * cache[i + 2] for i in (0, 1)), *rows)
    real = ~np.isnan(wanted)
    np.testing.assert_allclose(context[real], wanted[real], 1e-5, 1e-5)
    for got, scale, want in ((*after[::2], want_keys), (*after[1::2], want_values)):
        assert got.dtype == np.int8
        np.testing.assert_allclose(got * scale, want, 1e-5, 1e-6)


def test_scores_are_summed_in_f32_whatever_the_caches_are(run, attend):
    q, k, v, keys, values, *rows = inputs(starts=[1], lengths=[1], n=1, dtype="bf16")
    q[...], k[...], keys[...] = [16, 1, 0, 0], [16, 1, 0, 0], [16, 0, 0, 0]  # bf16 has 256, but not 257
    values[...], v[...] = 0, 1
    context, *_ = run(lambda *x: attend(*x, width=POSITIONS, scale=1.0), q, k, v, keys, values, *rows)
    np.testing.assert_allclose(context.astype(np.float32), 1 / (1 + np.exp(-1)), rtol=2**-8)


@pytest.mark.parametrize("width", [6, POSITIONS])
def test_nan_that_another_sequence_left_reaches_only_who_uses_its_slot(run, attend, width):
    arrays = inputs(starts=[2, 0], lengths=[1, 1], n=1)
    want, *_ = reference(*arrays)
    arrays[3][:KV_HEADS, 4] = NAN  # a key: masked before it counts
    context, *_ = run(lambda *tensors: attend(*tensors, width=width, scale=0.5), *arrays)
    np.testing.assert_allclose(context, want, rtol=1e-5, atol=1e-5)
    arrays[4][:KV_HEADS, 4] = NAN  # a value: its weight is zero, and zero times NaN is NaN
    context, *_ = run(lambda *tensors: attend(*tensors, width=width, scale=0.5), *arrays)
    if kernels.level() == "off":
        assert np.isnan(context[0]).all()
    else:
        np.testing.assert_allclose(context[0], want[0], rtol=1e-5, atol=1e-5)  # unused positions are not read
    np.testing.assert_allclose(context[1], want[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n", [1, 16])
@pytest.mark.parametrize("width", [256, 1024])
def test_the_cache_is_written_in_place(attend, write, n, width):
    b, heads, d, positions = 2, 2, 64, 1024
    new, cache = np.zeros((b, n, heads, d), np.float32), np.zeros((b * heads, positions, d), np.float32)
    rows = np.zeros(b, np.int32)

    def graph(*tensors):
        context, keys, values = attend(*tensors, width=width, scale=1.0)
        keys.set_alias_to(tensors[3], must=True)
        values.set_alias_to(tensors[4], must=True)
        return context, keys, values

    memory = get_runtime("cpu", 1).compile(write(graph, new, new, new, cache, cache, rows, rows)).memory()
    assert memory.aliased == 2 * cache.nbytes
    assert memory.temporaries < 2 * cache.nbytes * width // positions + 2**20


RULES = [dict(alibi=True), dict(distances=True), dict(sinks=True), dict(window=3), dict(chunk=3), dict(softcap=2.0)]


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize(("starts", "lengths", "n"), [([0, 3], [5, 2], 5), ([7, 2], [1, 1], 1)])
def test_devices_that_divide_positions_give_what_one_gives(starts, lengths, n, rules, run):
    from transformers_neuronx import hlo
    from transformers_neuronx.layers.attention import _attend_body
    from transformers_neuronx.layers.spread import attend_spread
    from transformers_neuronx.layers.step import Spread

    random = np.random.default_rng(n)
    sizes = [[2, n, HEADS, D], [2, n, 1, D], [2, n, 1, D], [2, POSITIONS, D], [2, POSITIONS, D]]
    q, k, v, keys, values = (random.standard_normal(size).astype(np.float32) for size in sizes)
    step = [np.array(x, np.int32) for x in (starts, lengths)]
    bias = [random.standard_normal([HEADS, 4][: 1 + ("distances" in rules)]).astype(np.float32)] * (
        not {"alibi", "distances", "sinks"}.isdisjoint(rules)
    )
    named = dict(window=None, chunk=None, softcap=None, width=POSITIONS, scale=0.5)
    named |= {name: value for name, value in rules.items() if name in named}

    def attended(function, tensors, **more):
        biases = dict(zip(rules, tensors[7:], strict=False))
        return function(*tensors[:5], tensors[5:7], **biases, **named, **more)

    wanted, *_ = run(lambda *tensors: attended(_attend_body, tensors), q, k, v, *step, keys, values, *bias)

    def spread(*tensors):
        context, *_ = attended(attend_spread, tensors, spread=Spread(2, 2))
        return hlo.all_gather(context, 2, 2)

    halves = [[x[:, rank::2] for rank in range(2)] for x in (keys, values)]
    heads = [np.split(q, 2, axis=2), *(np.split(x, 2) for x in bias)]
    [got] = run(spread, heads[0], *([x, x] for x in (k, v, *step)), *halves, *heads[1:], degree=2)
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(got[row, :length], wanted[row, :length], atol=1e-5)
