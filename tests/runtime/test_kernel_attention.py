"""The CPU's attention against NumPy, for each instruction set of the processor."""

import math

import numpy as np
import pytest
from levels import at_every_level

from transformers_neuronx.layers.attention import _attend
from transformers_neuronx.pyhlo.dtypes import element_type
from transformers_neuronx.runtimes import get_runtime, kernels

pytestmark = pytest.mark.skipif(not kernels.built(), reason="the kernels were not built: they need a C++ compiler")

# Relative to the largest value: the error of sums in f32, and the rounding of results.
BOUNDS = dict(f32=2e-6, bf16=2**-8, f16=2**-11)


@pytest.fixture
def random():
    return np.random.default_rng(0)


def operands(random, rows, tokens, heads, kv_heads, size, positions, *, s8=False, slots=None):
    """Return q, k, v, start, length, cache, and slots if not all: rows at odd positions, one of three with no token."""
    active = [random.normal(size=(rows, tokens, count, size)) for count in (heads, kv_heads, kv_heads)]
    length = random.integers(1, tokens + 1, rows)
    length[[0, *range(2, rows, 3)]] = [tokens] + [0] * len(range(2, rows, 3))
    start = np.array([random.integers(0, positions - count + 1) for count in length])
    shape = ((slots or rows) * kv_heads, positions, size)
    cache = [random.integers(-127, 128, shape) if s8 else random.normal(size=shape) for _ in range(2)]
    scales = [random.random((*shape[:2], 1), np.float32) / 64 for _ in range(2)] if s8 else []
    own = [random.permutation(slots)[:rows].astype(np.int32)] if slots else []
    return active, [start.astype(np.int32), length.astype(np.int32)], [*cache, *scales], own


def stored(x):
    """Quantize as a cache of 8 bits does: whole numbers and scales."""
    scale = np.abs(x).max(-1, keepdims=True) * np.float32(1 / 127)
    return np.rint(x * (1 / np.where(scale == 0, 1, scale))), scale


def reference(active, stands, cache, own, slopes, biases, sinks, scale, window=None, softcap=None, chunk=None):
    """Compute the context for real tokens, and the cache after it."""
    q, k, v = (x.astype(np.float32) for x in active)
    heads = q.shape[2]
    kv_heads = k.shape[2]
    new = [*zip(*map(stored, (k, v)), strict=True)] if len(cache) == 4 else [[k, v]]
    new = [part for both in new for part in both]
    cache = [x.astype(np.float32).reshape(-1, kv_heads, *x.shape[1:]) for x in cache]
    context = np.zeros(q.shape)
    for row, (start, length) in enumerate(zip(*stands, strict=True)):
        slot = own[0][row] if own else row
        for array, given in zip(cache, new, strict=True):
            array[slot, :, start : start + length] = given[row, :length].swapaxes(0, 1)
        seen = [array[slot].astype(np.float64) for array in cache]
        keys, values = seen if len(seen) == 2 else (seen[0] * seen[2], seen[1] * seen[3])
        keys, values = (x.repeat(heads // kv_heads, 0) for x in (keys, values))
        scores = np.einsum("nhd,hpd->hnp", q[row, :length], keys) * scale
        positions = keys.shape[1]
        distance = start + np.arange(length)[:, None] - np.arange(positions)
        scores = np.tanh(scores / softcap) * softcap if softcap else scores
        scores = scores - (np.zeros(heads) if slopes is None else slopes)[:, None, None] * distance
        if biases is not None:
            scores = scores + biases[:, distance.clip(0, biases.shape[1] - 1)]
        before = (start + np.arange(length)[:, None]) % (chunk or positions)  # so many may be seen
        seen = (distance >= 0) & (distance < (window or math.inf)) & (distance <= before)
        scores = np.where(seen, scores, -np.inf)
        if sinks is not None:  # one more position, which has no value
            scores = np.concatenate([scores, np.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))], -1)
            values = np.concatenate([values, np.zeros_like(values[:, :1])], 1)
        weights = np.exp(scores - scores.max(-1, keepdims=True, initial=-1e300))
        context[row, :length] = np.einsum("hnp,hpd->nhd", weights / weights.sum(-1, keepdims=True), values)
    return context, *(array.reshape(-1, *array.shape[2:]) for array in cache)


def compiled(write, held, arrays=2, also=(), alone=False, **attributes):
    """Compile a program of attention alone, with its cache in place; after its `arrays`, the operands named `also`."""
    options = dict(width=held[5].shape[1], scale=held[0].shape[-1] ** -0.5) | attributes

    def graph(*tensors):
        cache, rest = tensors[5 : 5 + arrays], tensors[5 + arrays :]
        q, k, v, *stands = tensors[:5]
        given = dict(zip(also, rest, strict=True))
        context, *after = _attend(q, k, None if alone else v, *stands, cache, **given, **options)
        for new, old in zip(after, tensors[5:], strict=False):
            new.set_alias_to(old, must=True)
        return [context, *after]

    program = get_runtime("cpu", 1).compile(write(graph, *held))
    assert program.text().count(kernels.target("attention")) == 1 and " copy(" not in program.text()
    return program


def check(write, active, stands, cache, own, dtype, slopes=None, biases=None, sinks=None, alone=False, **attributes):
    """Compare with the reference, for keys `alone` with one whose values are the same."""
    kind = element_type(dtype).numpy
    active = [x.astype(kind) for x in active]
    cache = [x.astype(np.int8 if len(cache) == 4 else kind) for x in cache[:2]] + cache[2:]
    if alone:
        active, cache = [*active[:2], active[1]], cache[::2]
    given = {"alibi": slopes, "distances": biases, "sinks": sinks}
    given = {name: array for name, array in given.items() if array is not None}
    arrays, also = [*active, *stands, *cache, *own, *given.values()], [*(["slots"] if own else []), *given]
    program = compiled(write, arrays, len(cache), also, alone, **attributes)
    cache = [array for array in cache for _ in range(2)] if alone else cache
    options = dict(scale=active[0].shape[-1] ** -0.5) | attributes
    want, *written = reference(active, stands, cache, own, slopes, biases, sinks, **options)
    real = np.arange(want.shape[1]) < stands[1][:, None]
    for context, *after in at_every_level(program, *arrays):
        np.testing.assert_allclose(
            context[real].astype(np.float64), want[real], rtol=0, atol=BOUNDS[dtype] * max(np.abs(want).max(), 1)
        )
        for got, reference_array in zip(after, written[::2] if alone else written, strict=True):
            np.testing.assert_array_equal(got.astype(np.float32), reference_array)


@pytest.mark.parametrize("tokens", [*range(1, 18), 40])
def test_tokens(write, random, tokens):
    check(write, *operands(random, 3, tokens, 4, 2, 20, 150), "f32")


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 3), (8, 1), (9, 1), (40, 1), (12, 4)])
@pytest.mark.parametrize("tokens", [1, 5])
def test_heads(write, random, tokens, heads, kv_heads):
    check(write, *operands(random, 2, tokens, heads, kv_heads, 16, 70), "f32")


@pytest.mark.parametrize("size", [1, 7, 16, 33, 64, 80, 96, 128, 256, 576])
@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_features(write, random, tokens, size, dtype):
    check(write, *operands(random, 2, tokens, 4, 2, size, 90), dtype)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("tokens", [1, 20])
def test_a_cache_of_eight_bits(write, random, tokens, dtype):
    active, *rest = operands(random, 3, tokens, 4, 2, 24, 100, s8=True)
    active[1][0, 0], active[2][0, 0] = 0, 3e4  # the scale of zeros is zero
    check(write, active, *rest, dtype)


@pytest.mark.parametrize(("dtype", "heads", "size"), [("f32", 6, 28), ("bf16", 3, 576)])
@pytest.mark.parametrize("tokens", [1, 4, 20])
@pytest.mark.parametrize("s8", [False, True])
def test_keys_that_are_values(write, random, tokens, s8, dtype, heads, size):
    check(write, *operands(random, 3, tokens, heads, 1, size, 100, slots=7, s8=s8), dtype, alone=True)


@pytest.mark.parametrize("tokens", [1, 4, 20])
@pytest.mark.parametrize("s8", [False, True])
def test_slots_of_rows(write, random, tokens, s8):
    check(write, *operands(random, 3, tokens, 4, 2, 20, 64, slots=7, s8=s8), "f32")


HOW = [
    dict(window=1), dict(window=9), dict(window=64), dict(softcap=0.5), dict(scale=3), dict(chunk=1), dict(chunk=9),
    dict(chunk=64), dict(chunk=9, window=4),
]  # fmt: skip


@pytest.mark.parametrize("tokens", [1, 4, 20])
@pytest.mark.parametrize("how", HOW)
def test_what_is_seen_and_how(write, random, tokens, how):
    check(write, *operands(random, 2, tokens, 4, 2, 20, 200), "f32", **how)


@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize("slots", [None, 5])
def test_alibi(write, random, tokens, slots):
    check(write, *operands(random, 2, tokens, 4, 2, 20, 200, slots=slots), "f32", random.random(4, np.float32))


@pytest.mark.parametrize("tokens", [1, 4, 20])
@pytest.mark.parametrize("count", [1, 2, 17, 90, 300])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (9, 1)])
def test_biases_of_distances(write, random, tokens, count, heads):
    biases = random.normal(size=(heads[0], count)).astype(np.float32)
    check(write, *operands(random, 2, tokens, *heads, 20, 150), "f32", None, biases)


@pytest.mark.parametrize("tokens", [1, 4, 20])
@pytest.mark.parametrize("s8", [False, True])
@pytest.mark.parametrize("slopes", [False, True])
def test_biases_of_distances_beside_all_else(write, random, tokens, s8, slopes):
    given = operands(random, 3, tokens, 4, 2, 20, 100, slots=7, s8=s8)
    slope = random.random(4, np.float32) if slopes else None
    biases = random.normal(size=(4, 33)).astype(np.float32)
    check(write, *given, "bf16", slope, biases, window=40, softcap=3.0)


# Sinks that take almost all of the mass, half of it, and almost or exactly none; and of each head its own.
SINKS = {
    "most": np.full(4, 30), "some": np.full(4, 5), "hardly any": np.full(4, -30), "none": np.full(4, -np.inf),
    "each": np.array([9, 0, -9, -100]),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("tokens", [1, 4, 20])
@pytest.mark.parametrize("sinks", SINKS)
def test_sinks(write, random, tokens, sinks, dtype):
    check(write, *operands(random, 3, tokens, 4, 2, 20, 200), dtype, sinks=SINKS[sinks].astype(np.float32))


@pytest.mark.parametrize("tokens", [1, 4, 40])
@pytest.mark.parametrize("s8", [False, True])
@pytest.mark.parametrize("window", [None, 9])
def test_sinks_beside_all_else(write, random, tokens, s8, window):
    given = operands(random, 3, tokens, 4, 2, 20, 100, slots=7, s8=s8)
    biases = random.normal(size=(4, 33)).astype(np.float32)
    sinks = SINKS["each"].astype(np.float32)
    check(write, *given, "bf16", random.random(4, np.float32), biases, sinks, window=window, softcap=3.0)


@pytest.mark.parametrize("tokens", [1, 20])
def test_scores_far_apart(write, random, tokens):
    (q, *active), *rest = operands(random, 2, tokens, 4, 2, 20, 200)
    check(write, [np.rint(q * 1e3), *map(np.rint, active)], *rest[:1], [*map(np.rint, rest[1])], [], "f32", scale=1.0)


def contexts(write, arrays):
    arrays = [x if x.dtype == np.int32 else x.astype(np.float32) for x in arrays]
    return [context for context, *_ in at_every_level(compiled(write, arrays), *arrays)]


@pytest.mark.parametrize("tokens", [1, 20])
def test_what_is_not_in_use_is_not_read(write, random, tokens):
    active, stands, cache, _ = operands(random, 1, tokens, 4, 2, 20, 64)
    stands[0][0] = 30
    used = np.arange(64)[:, None] < 30
    clean, stained = (
        contexts(write, [*active, *stands, *(np.where(used, x, rest) for x in cache)]) for rest in (0, np.nan)
    )
    np.testing.assert_array_equal(clean, stained)


@pytest.mark.parametrize("tokens", [1, 20])
def test_what_is_not_finite_stays_with_those_that_see_it(write, random, tokens):
    active, stands, cache, _ = operands(random, 2, tokens, 4, 2, 20, 64)
    last = stands[1][1] - 1
    active[1][1, last, 1] = np.nan  # a key of the second row's last token
    for context in contexts(write, [*active, *stands, *cache]):
        assert np.isnan(context[1, last, 2:]).all() and np.isfinite(context[1, last, :2]).all()
        assert np.isfinite(context[0]).all() and np.isfinite(context[1, :last]).all()


def test_rows_that_are_not_in_the_cache_are_left_alone(write, random):
    active, stands, cache, own = operands(random, 3, 4, 4, 2, 20, 64, slots=3)
    own[0][:] = [-1, 3, 1]
    stands[0][:], stands[1][:] = [0, 0, 63], [4, 4, 4]
    arrays = [x if x.dtype == np.int32 else x.astype(np.float32) for x in [*active, *stands, *cache, *own]]
    for context, keys, values in at_every_level(compiled(write, arrays, also=["slots"]), *arrays):
        assert not context[:2].any() and not context[2, 1:].any() and context[2, 0].any()
        for after, before in ((keys, arrays[5]), (values, arrays[6])):
            changed = np.argwhere((after != before).any(-1))
            assert changed.tolist() == [[2, 63], [3, 63]]


@pytest.mark.parametrize("dtype", ["f8e4m3fn", "s8"])
def test_caches_that_it_does_not_take_are_left_to_the_body(write, random, dtype):
    active, stands, cache, _ = operands(random, 1, 1, 2, 2, 8, 16)
    arrays = [*(x.astype(np.float32) for x in active), *stands, *(x.astype(element_type(dtype).numpy) for x in cache)]
    module = write(lambda *tensors: list(_attend(*tensors[:5], tensors[5:], width=16, scale=1.0)), *arrays)
    assert kernels.target("attention") not in str(kernels.with_kernels(module))
