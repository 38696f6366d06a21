"""The CPU's attention to a memory against NumPy, for each instruction set of the processor."""

import itertools

import numpy as np
import pytest
from levels import at_every_level

from transformers_neuronx.layers.memory import _attend_to
from transformers_neuronx.pyhlo.dtypes import element_type
from transformers_neuronx.runtimes import get_runtime, kernels

pytestmark = pytest.mark.skipif(not kernels.built(), reason="the kernels were not built: they need a C++ compiler")

# Relative to the largest value: the error of sums in f32, and the rounding of results.
BOUNDS = dict(f32=2e-6, bf16=2**-8, f16=2**-11)
HEADS = [(1, 1), (4, 4), (8, 2), (9, 1)]
SHARED = list(itertools.product([False, True], repeat=3))  # a bias by rows, by heads, by tokens


@pytest.fixture
def random():
    return np.random.default_rng(0)


def operands(random, tokens, heads, kv_heads, size, positions):
    """Return q, keys, values, lengths: rows see no position, one, most, all, and more than there are."""
    lengths = np.array([0, 1, positions - positions // 3, positions, positions + 5], np.int32)
    q = random.normal(size=(len(lengths), tokens, heads, size))
    return [q, *random.normal(size=(2, len(lengths), positions, kv_heads, size)), lengths]


def biases(random, given, shared=(False, False, False)):
    """Return a bias of scores, with one row, head or token where these share it."""
    rows, tokens, heads, _ = given[0].shape
    rows, heads, tokens = (1 if one else count for one, count in zip(shared, (rows, heads, tokens), strict=True))
    return random.normal(size=(rows, heads, given[1].shape[1], tokens)).astype(np.float32)


def typed(arrays, dtype):
    return [x.astype(element_type(dtype).numpy) if x.dtype == np.float64 else x for x in arrays]


def reference(q, keys, values, lengths, bias=None, slots=None, *, scale):
    if slots is not None:
        keys, values, lengths = (x[np.clip(slots, 0, len(x) - 1)] for x in (keys, values, lengths))
    q, keys, values = (x.astype(np.float64) for x in (q, keys, values))
    keys, values = (x.repeat(q.shape[2] // keys.shape[2], 2) for x in (keys, values))
    scores = np.einsum("bnhd,bmhd->bhnm", q, keys) * scale
    if bias is not None:
        scores = scores + bias.astype(np.float64).swapaxes(2, 3)
    seen = np.arange(keys.shape[1]) < lengths[:, None, None, None]
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - np.maximum(scores.max(-1, keepdims=True), -1e300))
    total = weights.sum(-1, keepdims=True)
    return np.einsum("bhnm,bmhd->bnhd", weights / np.where(total == 0, 1, total), values)


def compiled(write, arrays, **attributes):
    def attended(q, keys, values, lengths, bias=None, slots=None):
        return [_attend_to(q, keys, values, lengths, slots, bias, **attributes)]

    program = get_runtime("cpu", 1).compile(write(attended, *arrays))
    assert program.text().count(kernels.target("attend_to")) == 1
    return program


def check(write, dtype, *arrays, scale=None):
    arrays = typed(arrays, dtype)
    scale = arrays[0].shape[-1] ** -0.5 if scale is None else scale
    want = reference(*arrays, scale=scale)
    bound = BOUNDS[dtype] * max(np.abs(want).max(), 1)
    for [context] in at_every_level(compiled(write, arrays, scale=scale), *arrays):
        assert context.dtype == arrays[0].dtype
        np.testing.assert_allclose(context.astype(np.float64), want, rtol=0, atol=bound)


@pytest.mark.parametrize("tokens", [*range(1, 19), 40])
@pytest.mark.parametrize("heads", HEADS)
def test_tokens(write, random, tokens, heads):
    given = operands(random, tokens, *heads, 20, 75)
    check(write, "f32", *given)
    check(write, "f32", *given, biases(random, given))


@pytest.mark.parametrize("size", [1, 7, 16, 33, 64, 96, 128, 256])
@pytest.mark.parametrize("tokens", [1, 3, 20])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
def test_features(write, random, tokens, size, dtype, heads):
    given = operands(random, tokens, *heads, size, 70)
    check(write, dtype, *given, biases(random, given))


@pytest.mark.parametrize("positions", [1, 2, 3, 15, 16, 17, 31, 63, 64, 65, 127, 128, 131, 200])
@pytest.mark.parametrize("tokens", [1, 6, 20])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_positions(write, random, tokens, positions, dtype):
    given = operands(random, tokens, 4, 4, 24, positions)
    check(write, dtype, *given)
    check(write, dtype, *given, biases(random, given))


@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.parametrize("heads", HEADS)
def test_biases(write, random, tokens, heads, shared):
    given = operands(random, tokens, *heads, 16, 67)
    check(write, "f32", *given, biases(random, given, shared))


@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
def test_masks(write, random, tokens, heads, shared):
    """Mask every second position, whole blocks from the first on, and all; scores are low, so 0 would stand out."""
    q, keys, *rest = operands(random, tokens, *heads, 16, 200)
    given = [np.rint(q), np.rint(keys), *rest]
    bias = np.rint(biases(random, given, shared)) - 300  # scores are exact in f32 with it
    bias[..., ::2, :] = -np.inf
    bias[:, -1:, :130] = -np.inf
    bias[:, :, :, -1] = np.where(bias.shape[3] > 1, -np.inf, bias[:, :, :, -1])
    bias[-1, 0] = -np.inf
    check(write, "f32", *given, bias)
    check(write, "bf16", *given, bias)


@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize("tokens", [1, 5, 20])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("heads", HEADS)
def test_rows_choose_their_memory(write, random, tokens, dtype, heads, shared):
    q, *memory = operands(random, tokens, *heads, 20, 75)
    slots = np.array([2, 4, 2, 0, -1, 3, 9], np.int32)  # some twice, some never, and some that do not exist
    q = random.normal(size=(len(slots), *q.shape[1:]))
    check(write, dtype, q, *memory, biases(random, [q, *memory], shared), slots)


@pytest.mark.parametrize("tokens", [1, 20])
def test_scores_far_apart(write, random, tokens):
    q, keys, values, lengths = operands(random, tokens, 4, 2, 20, 150)
    check(write, "f32", np.rint(q * 1e3), np.rint(keys), values, lengths, scale=1.0)


@pytest.mark.parametrize("tokens", [1, 7, 20])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_what_is_not_finite_stays_with_those_that_see_it(write, random, tokens, dtype):
    q, keys, values, lengths = operands(random, tokens, 4, 2, 20, 66)
    keys[:, 44, 1], values[:, 65, 0] = np.nan, np.nan  # the third of five rows sees 44 positions, the last two see all
    q[1, 0, 0, 0] = np.nan
    arrays = typed([q, keys, values, lengths], dtype)
    want = np.zeros(q.shape[:3], bool)
    want[3:] = True  # values of the first head, and keys of the second
    want[1, 0, 0] = True
    for [context] in at_every_level(compiled(write, arrays, scale=0.25), *arrays):
        np.testing.assert_array_equal(np.isnan(context.astype(np.float32)).any(-1), want)


@pytest.mark.parametrize("tokens", [1, 5, 20])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
def test_a_bias_that_is_not_a_number(write, random, tokens, heads):
    given = operands(random, tokens, *heads, 20, 66)
    bias = biases(random, given)
    bias[3, 1, 65, -1] = bias[2, 0, 50, 0] = np.nan  # the latter is past the row's length
    arrays = typed([*given, bias], "f32")
    want = np.zeros(given[0].shape[:3], bool)
    want[3, -1, 1] = True
    for [context] in at_every_level(compiled(write, arrays, scale=0.25), *arrays):
        np.testing.assert_array_equal(np.isnan(context).any(-1), want)


def test_a_length_below_zero_is_none(write, random):
    q, keys, values, _ = typed(operands(random, 20, 4, 4, 20, 66), "f32")
    arrays = [q, keys, values, np.array([-1, -(2**31), 3, 2**31 - 1, 0], np.int32)]
    for [context] in at_every_level(compiled(write, arrays, scale=0.25), *arrays):
        assert context.any((1, 2, 3)).tolist() == [False, False, True, True, False]


@pytest.mark.parametrize("size", [8, kernels.limits().get("head", 0) + 1])
@pytest.mark.parametrize("dtype", ["f32", "f8e4m3fn"])
def test_what_it_does_not_take_is_left_to_the_body(write, random, size, dtype):
    arrays = typed(operands(random, 1, 2, 2, size, 9), dtype)
    module = write(lambda *tensors: [_attend_to(*tensors)], *arrays)
    taken = (size, dtype) == (8, "f32")
    assert (kernels.target("attend_to") in str(kernels.with_kernels(module))) == taken


def test_its_time_is_told(write, random):
    arrays = typed(operands(random, 1, 2, 2, 8, 9), "f32")
    program, before = compiled(write, arrays), kernels.spent()["attend_to"]
    levels = len([*at_every_level(program, *arrays)])
    calls, seconds = (now - then for now, then in zip(kernels.spent()["attend_to"], before, strict=True))
    assert calls == levels and seconds > 0
