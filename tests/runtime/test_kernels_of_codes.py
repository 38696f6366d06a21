"""The linear kernel for weights whose bits stand for floats, against NumPy and the body, at every level."""

import ml_dtypes
import numpy as np
import pytest
from levels import at_every_level
from test_kernels import activations, check, compiled, laid_out

from transformers_neuronx.layers.linear import Part, _linear, _linear_body
from transformers_neuronx.pyhlo.dtypes import element_type
from transformers_neuronx.runtimes import kernels

pytestmark = pytest.mark.skipif(not kernels.built(), reason="the kernels were not built: they need a C++ compiler")

F8 = ml_dtypes.float8_e4m3fn
TYPES = ("f32", "bf16", "f16")


@pytest.mark.parametrize("rows", [1, 6, 8, 20])
@pytest.mark.parametrize("x_type", TYPES)
def test_every_f8_comes_out_exactly(write, run, x_type, rows):
    """The products with a row of ones and zeros are the numbers themselves: subnormal ones, zeros and NaN too."""
    codes, number = np.arange(256, dtype=np.uint8), element_type(x_type).numpy
    weight = codes[(np.arange(256)[:, None] + 37 * np.arange(8)) % 256].view(F8)  # each in every place of a word
    operands = laid_out(weight), np.float32(2.0 ** np.random.default_rng(0).integers(-9, 9, 256))
    wanted = weight.astype(np.float32) * operands[1][:, None]
    finite = np.nan_to_num(weight.astype(np.float32)).astype(F8)
    for place in range(8):
        x = np.zeros((rows, 8), number)
        x[:, place] = 1
        graph = lambda x, *w: _linear(x, [Part(*w)], panels=[(256, 8)])  # noqa: E731
        plain = laid_out(finite), operands[1]
        [body] = run(lambda x, *w: _linear_body(x, [Part(*w)], panels=[(256, 8)]), x, *plain)
        for [got] in at_every_level(compiled(write, graph, "linear", x, *plain), x, *plain):
            np.testing.assert_array_equal(got, np.tile(finite[:, place].astype(np.float32) * operands[1], (rows, 1)))
            np.testing.assert_array_equal(got, body)
        [body] = run(lambda x, *w: _linear_body(x, [Part(*w)], panels=[(256, 8)]), x, *operands)
        for [got] in at_every_level(compiled(write, graph, "linear", x, *operands), x, *operands):
            broken = np.isnan(wanted).any(1)  # NaN times zero is NaN
            assert (np.isnan(got) == broken).all() and (np.isnan(body) == broken).all()


@pytest.mark.parametrize(
    ("group", "groups", "outputs"),
    [(None, 1, 1), (None, 31, 5), (None, 257, 130), (4, 3, 33), (128, 3, 40), (16, 21, 6)],
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


def test_what_the_kernel_does_not_take_of_f8_is_left_to_the_body(write):
    x, weight = np.zeros((2, 32), np.float32), laid_out(np.zeros((16, 32), F8))
    scale = laid_out(np.ones((16, 1), np.float32), 1)

    def taken(*parts, **more):
        module = write(lambda x, *w: _linear(x, [Part(*w)], panels=[(16, 32)], **more), x, *parts)
        return kernels.target("linear") in str(kernels.with_kernels(module))

    assert taken(weight, scale) and taken(weight, np.ones(16, np.float32))
    assert not taken(weight, scale, rounded=32) and not taken(weight, scale, scale)
