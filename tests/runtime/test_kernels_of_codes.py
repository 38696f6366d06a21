"""The linear kernel for weights whose bits stand for floats, against NumPy and the body, at every level."""

import ml_dtypes
import numpy as np
import pytest
from levels import at_every_level
from test_kernels import activations, check, compiled, laid_out

from transformers_neuronx.layers.linear import Part, _linear, _linear_body
from transformers_neuronx.pyhlo.dtypes import element_type, numpy_to_torch, torch_to_numpy
from transformers_neuronx.runtimes import kernels
from transformers_neuronx.weights.codes import CODES
from transformers_neuronx.weights.quantization import Storage

pytestmark = pytest.mark.skipif(not kernels.built(), reason="the kernels were not built: they need a C++ compiler")

F8 = ml_dtypes.float8_e4m3fn
TYPES = ("f32", "bf16", "f16")


@pytest.mark.parametrize("inputs", [8, 32])
@pytest.mark.parametrize("rows", [1, 6, 8, 20])
@pytest.mark.parametrize("x_type", TYPES)
@pytest.mark.few(5)
def test_every_f8_comes_out_exactly(write, run, x_type, rows, inputs):
    """The products with a row of ones and zeros are the numbers themselves: subnormal ones, zeros and NaN too."""
    codes, number = np.arange(256, dtype=np.uint8), element_type(x_type).numpy
    weight = codes[(np.arange(256)[:, None] + 37 * np.arange(inputs)) % 256].view(F8)  # each in every place of a word
    operands = laid_out(weight), np.float32(2.0 ** np.random.default_rng(0).integers(-9, 9, 256))
    wanted = weight.astype(np.float32) * operands[1][:, None]
    finite = np.nan_to_num(weight.astype(np.float32)).astype(F8)
    for place in range(8):
        x = np.zeros((rows, inputs), number)
        x[:, place] = 1
        graph = lambda x, *w: _linear(x, [Part(*w)], panels=[(256, inputs)])  # noqa: E731
        plain = laid_out(finite), operands[1]
        [body] = run(lambda x, *w: _linear_body(x, [Part(*w)], panels=[(256, inputs)]), x, *plain)
        for [got] in at_every_level(compiled(write, graph, "linear", x, *plain), x, *plain):
            np.testing.assert_array_equal(got, np.tile(finite[:, place].astype(np.float32) * operands[1], (rows, 1)))
            np.testing.assert_array_equal(got, body)
        [body] = run(lambda x, *w: _linear_body(x, [Part(*w)], panels=[(256, inputs)]), x, *operands)
        for [got] in at_every_level(compiled(write, graph, "linear", x, *operands), x, *operands):
            broken = np.isnan(wanted).any(1)  # NaN times zero is NaN
            assert (np.isnan(got) == broken).all() and (np.isnan(body) == broken).all()


@pytest.mark.parametrize(
    ("group", "groups", "outputs"),
    [(None, 1, 1), (None, 31, 5), (None, 257, 130), (None, 544, 70), (4, 3, 33), (128, 3, 40), (16, 21, 6)],
)
@pytest.mark.parametrize("x_type", TYPES)
def test_linear_of_f8(write, x_type, groups, outputs, group):
    random, inputs = np.random.default_rng(0), groups * (group or 1)
    weight = random.normal(size=(outputs, inputs)).astype(F8)
    weight[0, :3] = np.float32([2**-9, 7 * 2**-9, -(2**-7)])[:inputs].astype(F8)
    scale = random.random((outputs, groups) if group else outputs, np.float32)
    each = np.repeat(scale, group, 1) if group else scale[:, None]
    operands = laid_out(weight), laid_out(scale, 1) if group else scale
    check(write, activations(random, x_type, inputs), weight.astype(np.float64) * each, *operands)


@pytest.mark.parametrize(("group", "groups"), [(None, 320), (128, 3), (16, 21)])
def test_many_rows_of_f8_come_out_alike_in_every_company(write, group, groups):
    random, inputs = np.random.default_rng(0), groups * (group or 1)
    x = random.normal(size=(51, inputs)).astype(ml_dtypes.bfloat16)
    weight = laid_out(random.normal(size=(70, inputs)).astype(F8))
    scale = random.random((70, groups) if group else 70, np.float32)
    scale = laid_out(scale, 1) if group else scale
    graph = lambda x, *parts: _linear(x, [Part(*parts)], panels=[(70, inputs)])  # noqa: E731
    found = {}
    for count in (51, 34, 17):
        program = compiled(write, graph, "linear", x[:count], weight, scale)
        for first in range(0, 52 - count, 17):
            given = x[first : first + count], weight, scale
            for level, [got] in zip(kernels.built().levels(), at_every_level(program, *given), strict=True):
                np.testing.assert_array_equal(got, found.setdefault(level, got)[first : first + count])


def test_what_the_kernel_does_not_take_of_f8_is_left_to_the_body(write):
    x, weight = np.zeros((2, 32), np.float32), laid_out(np.zeros((16, 32), F8))
    scale = laid_out(np.ones((16, 1), np.float32), 1)

    def taken(*parts, **more):
        module = write(lambda x, *w: _linear(x, [Part(*w)], panels=[(16, 32)], **more), x, *parts)
        return kernels.target("linear") in str(kernels.with_kernels(module))

    assert taken(weight, scale) and taken(weight, np.ones(16, np.float32))
    assert not taken(weight, scale, rounded=32) and not taken(weight, scale, scale)


def in_bytes(codes, group):
    return torch_to_numpy(Storage("s4", group)._in_bytes(numpy_to_torch(codes.astype(np.int8))))


@pytest.mark.parametrize("rows", [1, 8, 20])
@pytest.mark.parametrize("x_type", TYPES)
@pytest.mark.parametrize("name", CODES)
@pytest.mark.few(9)
def test_every_code_comes_out_exactly(write, run, name, x_type, rows):
    """The products with a row of ones and zeros are the numbers themselves, times a power of two."""
    codes = (np.arange(40)[:, None] + 5 * np.arange(16)) % 16  # each in every place of a word
    scale = np.float32(2.0 ** np.random.default_rng(0).integers(-9, 9, (40, 2))).astype(ml_dtypes.bfloat16)
    wanted = np.float32(CODES[name])[codes] * np.repeat(scale.astype(np.float32), 8, 1)
    operands = laid_out(in_bytes(codes, 8)), laid_out(scale, 1)
    attributes = dict(panels=[(40, 8)], codes=name)
    graph = lambda x, *w: _linear(x, [Part(*w)], **attributes)  # noqa: E731
    for place in range(16):
        x = np.zeros((rows, 16), element_type(x_type).numpy)
        x[:, place] = 1
        for [got] in at_every_level(compiled(write, graph, "linear", x, *operands), x, *operands):
            np.testing.assert_array_equal(got, np.tile(wanted[:, place], (rows, 1)))
        [body] = run(lambda x, *w: _linear_body(x, [Part(*w)], **attributes), x, *operands)
        np.testing.assert_array_equal(body, np.tile(wanted[:, place].astype(x.dtype), (rows, 1)).astype(np.float32))


@pytest.mark.parametrize("of_groups", TYPES)
@pytest.mark.parametrize(
    ("group", "groups", "outputs"), [(8, 1, 1), (32, 21, 6), (16, 5, 40), (64, 3, 130), (4096, 2, 17)]
)
@pytest.mark.parametrize("x_type", TYPES)
@pytest.mark.parametrize("name", CODES)
@pytest.mark.few(30)
def test_linear_of_codes(write, name, x_type, groups, outputs, group, of_groups):
    random, inputs = np.random.default_rng(0), groups * group
    codes = random.integers(0, 16, (outputs, inputs))
    scale = random.normal(size=(outputs, groups)).astype(element_type(of_groups).numpy)
    wide = np.float64(np.float32(CODES[name]))[codes] * np.repeat(scale.astype(np.float64), group, 1)
    operands = laid_out(in_bytes(codes, group)), laid_out(scale, 1)
    check(write, activations(random, x_type, inputs), wide, *operands, codes=name)


def test_what_the_kernel_does_not_take_of_codes_is_left_to_the_body(write):
    x, weight, scale = np.zeros((2, 32), np.float32), np.zeros((16, 16), np.uint8), np.ones((16, 1), np.float32)
    weight, scale = laid_out(weight), laid_out(scale, 1)

    def taken(*parts, codes="e2m1", **more):
        module = write(lambda x, *w: _linear(x, [Part(*w)], panels=[(16, 16)], codes=codes, **more), x, *parts)
        return kernels.target("linear") in str(kernels.with_kernels(module))

    assert taken(weight, scale)
    assert not taken(weight, scale, rounded=32) and not taken(weight, scale, scale)
