"""The CPU's kernels against the bodies that they replace, at every level of instructions that the processor has."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from levels import at_every_level

from transformers_neuronx import hlo
from transformers_neuronx.layers import ACTIVATIONS
from transformers_neuronx.layers.choice import BROKEN, _likeliest
from transformers_neuronx.layers.linear import _linear
from transformers_neuronx.layers.norm import _layer_norm, _rms_norm
from transformers_neuronx.pyhlo.dtypes import element_type
from transformers_neuronx.runtimes import get_runtime, kernels

TINY_KJV = Path(__file__).parents[2] / "examples" / "tiny-kjv"
ROWS = (1, 2, 3, 4, 5, 7, 8, 17)
ALL_BUT_FINITE = (np.nan, np.inf, -np.inf)

# Some logits of the bundled checkpoint, with what NEURONX_KERNELS says.
LOGITS = """
import json, logging, sys
logging.basicConfig(format="%(message)s")
amp = sys.argv[2]
sys.modules.update(dict.fromkeys(sys.argv[3:]))  # what cannot be imported
from transformers_neuronx.config import NeuronConfig, QuantizationConfig
from transformers_neuronx.gpt2.model import GPT2ForSampling
switches = NeuronConfig(quant=QuantizationConfig("s8"))
model = GPT2ForSampling.from_pretrained(sys.argv[1], n_positions=[16], amp=amp, neuron_config=switches)
model.to_neuron()
print(json.dumps([model([[5, 6, 7]]).tolist(), model.decoder.runtime.fingerprint["kernels"]]))
"""


def logits(level, *missing, amp="bf16"):
    command = [sys.executable, "-c", LOGITS, str(TINY_KJV), amp, *missing]
    environment = os.environ | dict(NEURONX_KERNELS=level, NEURONX_CACHE="off")
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_without_kernels_it_is_said_once_what_that_costs():
    ran = logits("auto", "transformers_neuronx.runtimes.kernels._kernels")
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("the kernels were not built") == 1
    values, fingerprint = json.loads(ran.stdout)
    assert fingerprint == "off"
    off = logits("off", "transformers_neuronx.runtimes.kernels._kernels")
    assert json.loads(off.stdout) == [values, "off"] and not off.stderr


pytestmark = pytest.mark.skipif(
    not (kernels.built() or shutil.which("c++")), reason="the kernels were not built: they want a C++ compiler"
)


def test_they_are_built_where_there_is_a_compiler():
    assert kernels.built(), "the kernels were not built: python setup.py build_ext --inplace"


def test_a_level_is_chosen_by_the_environment():
    [exact, _] = json.loads(logits("off", amp="f32").stdout)
    errors = {}
    for level in ("off", "auto", "portable"):
        ran = logits(level)
        assert ran.returncode == 0 and not ran.stderr, ran.stderr
        values, fingerprint = json.loads(ran.stdout)
        assert fingerprint.startswith(kernels.built().levels()[-1] if level == "auto" else level)
        errors[level] = np.abs(np.subtract(values, exact)).mean()
    assert 0 < errors["auto"] < errors["off"] and 0 < errors["portable"] < errors["off"], errors
    ran = logits("sse9")
    assert "NEURONX_KERNELS wants to be auto, off, portable" in ran.stderr and "got 'sse9'" in ran.stderr


def compiled(write, graph, kernel, *operands):
    """The program of a graph of calls that the kernel serves, all of them."""
    module = write(graph, *operands)
    program = get_runtime("cpu", 1).compile(module)
    calls = str(module).count(f'value: "{kernel}"')
    assert program.text().count(f'"{kernels.target(kernel)}"') == calls > 0
    return program


def check(write, xs, wide, *weight):
    """Products held against NumPy in f64, as near as 16 bits of activations, or the sums of f32, come."""
    operands = [*xs, *weight]
    module = write(
        lambda *tensors: [_linear(x, *tensors[len(xs) :], scaled=len(weight) > 1) for x in tensors[: len(xs)]],
        *operands,
    )
    program = get_runtime("cpu", 1).compile(module)
    assert program.text().count(kernels.target("linear")) == len(xs)
    for x, results in zip(xs, zip(*at_every_level(program, *operands), strict=True), strict=True):
        x, rows = x.astype(np.float64), x.size // x.shape[-1]
        # Many rows go with weights of 4 bits in bf16, as in the body.
        rounding = 2**-8 if weight[0].dtype == np.uint8 and operands[0].dtype.itemsize == 2 and rows > 16 else 4e-5
        for got in results:
            finite = np.isfinite(x).all(-1)
            assert np.isnan(got[~finite]).all()
            bound = ((rounding * np.abs(x[finite]) + 1e-30) @ np.abs(wide).T).max(initial=0)
            assert (np.abs(got[finite] - x[finite] @ wide.T) <= bound).all()


def activations(random, dtype, inputs):
    """Rows of many counts and shapes."""
    xs = [random.normal(size=(rows, inputs)) for rows in ROWS]
    xs += [random.normal(size=(2, 3, inputs)), np.zeros((2, inputs)), np.full((1, inputs), 1e-36)]
    return [x.astype(element_type(dtype).numpy) for x in xs]


@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (7, 3), (31, 5), (64, 16), (257, 130), (1000, 33)])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_linear(write, dtype, inputs, outputs):
    random = np.random.default_rng(0)
    weight = random.normal(size=(outputs, inputs)).astype(element_type(dtype).numpy)
    check(write, activations(random, dtype, inputs), weight.astype(np.float64), weight)


@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (31, 5), (257, 130), (9000, 3)])
@pytest.mark.parametrize("x_type", ["bf16", "f16"])
def test_linear_of_eight_bits(write, x_type, inputs, outputs):
    random = np.random.default_rng(0)
    weight = random.integers(-127, 128, (outputs, inputs)).astype(np.int8)
    scale = random.random(outputs, np.float32)
    xs = activations(random, x_type, inputs)
    xs.append(np.full((1, inputs), 3).astype(xs[0].dtype))  # the largest sums
    xs.append(np.tile(np.array(ALL_BUT_FINITE)[:, None], inputs).astype(xs[0].dtype))
    check(write, xs, weight.astype(np.float64) * scale[:, None], weight, scale)


@pytest.mark.parametrize("group", [32, 64, 128, 256])
@pytest.mark.parametrize(("groups", "outputs"), [(1, 1), (3, 6), (8, 33), (21, 7)])
@pytest.mark.parametrize("x_type", ["bf16", "f16"])
def test_linear_of_four_bits(write, x_type, groups, outputs, group):
    random = np.random.default_rng(0)
    values = random.integers(-8, 8, (outputs, groups, 2, group // 2)).astype(np.int8)
    packed = (values[:, :, 0] & 15 | values[:, :, 1] << 4).astype(np.uint8).reshape(outputs, -1)
    scale = random.normal(size=(outputs, groups)).astype(ml_dtypes.bfloat16)
    wide = values.reshape(outputs, groups, group) * scale[:, :, None].astype(np.float64)
    check(write, activations(random, x_type, groups * group), wide.reshape(outputs, -1), packed, scale)


NUMPY = dict(
    gelu=lambda x: x * (np.vectorize(math.erf)(x / math.sqrt(2)) + 1) / 2,
    gelu_new=lambda x: x * (np.tanh((x + 0.044715 * x**3) * math.sqrt(2 / math.pi)) + 1) / 2,
    relu=lambda x: np.maximum(x, 0),
    silu=lambda x: x * (1 + np.tanh(x / 2)) / 2,
    tanh=np.tanh,
)


@pytest.mark.parametrize("rows", [1, 3, 16, 17, 300])
@pytest.mark.parametrize("outputs", [(5,), (70, 33), (300, 64, 1)])
@pytest.mark.parametrize("storage", ["f32", "bf16", "s8"])
def test_several_layers_are_one_call_with_their_biases(write, storage, outputs, rows):
    random, x_type = np.random.default_rng(0), element_type("f32" if storage == "f32" else "bf16").numpy
    x, operands, wanted = random.normal(size=(rows, 100)).astype(x_type), [], []
    for count in outputs:
        wide = random.integers(-127, 128, (count, 100)) / 128
        scale, bias = random.random(count, np.float32), random.normal(size=count).astype(x_type)
        weight = [(wide * 128).astype(np.int8), scale] if storage == "s8" else [wide.astype(x_type)]
        operands += [*weight, bias]
        wide = wide * scale[:, None] * 128 if storage == "s8" else wide
        wanted.append(x.astype(np.float64) @ wide.T + bias.astype(np.float64))
    attributes = dict(parts=len(outputs), scaled=storage == "s8", biased=True, dtype="f32")
    program = compiled(write, lambda *tensors: _linear(*tensors, **attributes), "linear", x, *operands)
    for results in at_every_level(program, x, *operands):
        for got, right in zip(results, wanted, strict=True):
            np.testing.assert_allclose(got, right, atol=2e-4 * np.abs(right).max())


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(write, activation, gated, rows):
    random = np.random.default_rng(0)
    alike = dict(gelu_fast="gelu_new", gelu_pytorch_tanh="gelu_new", swish="silu")
    x = random.normal(size=(rows, 64)).astype(np.float32)
    weights = [random.normal(size=(37, 64)).astype(np.float32) for _ in range(1 + gated)]
    weights[0][3:5] *= [[100], [0]]
    wanted = NUMPY[alike.get(activation, activation)](x.astype(np.float64) @ weights[0].T.astype(np.float64))
    wanted = wanted * (x.astype(np.float64) @ weights[1].T) if gated else wanted
    graph = lambda *tensors: _linear(*tensors, parts=1 + gated, activation=activation)  # noqa: E731
    program = compiled(write, graph, "linear", x, *weights)
    for [got] in at_every_level(program, x, *weights):
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("size", [1, 15, 64, 1000])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_norms(write, dtype, size):
    random, number = np.random.default_rng(0), element_type(dtype).numpy
    x = (random.normal(size=(3, 7, size)) + 2).astype(number)
    weight, bias = random.normal(size=(2, size)).astype(np.float32)
    wide, eps = x.astype(np.float64), 1e-3
    centered = wide - wide.mean(-1, keepdims=True)
    layer = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + eps) * weight + bias
    rms = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + eps) * weight
    tolerance = dict(f32=1e-5, bf16=2**-7, f16=2**-10)[dtype]
    for norm, wanted, *operands in [(_layer_norm, layer, weight, bias), (_rms_norm, rms, weight)]:
        kernel = "layer_norm" if norm is _layer_norm else "rms_norm"
        program = compiled(write, lambda *tensors: norm(*tensors, eps=eps), kernel, x, *operands)  # noqa: B023
        for [got] in at_every_level(program, x, *operands):
            assert got.dtype == number
            np.testing.assert_allclose(got.astype(np.float64), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("vocabulary", [1, 5, 16, 50, 1003])
def test_the_likeliest_token(write, vocabulary):
    random = np.random.default_rng(0)
    logits = random.integers(-4, 5, (40, vocabulary)).astype(np.float32)  # many are level
    logits[1:4] = [[np.nan], [np.inf], [-np.inf]]
    logits[4, : vocabulary // 2], logits[5, -1], logits[6, 0] = -np.inf, np.nan, np.inf
    seen, penalty = random.random((40, vocabulary)) < 0.5, random.choice([1, 0.5, 3], 40).astype(np.float32)
    column = penalty[:, None]
    wanted = np.where(seen, np.where(logits < 0, logits * column, logits / column), logits).argmax(-1)
    wanted[~np.isfinite(logits.max(-1))] = BROKEN
    program = compiled(write, _likeliest, "likeliest", logits, seen, penalty)
    for [got] in at_every_level(program, logits, seen, penalty):
        assert got.tolist() == wanted.tolist()


@pytest.mark.parametrize("group", [8, 16, 96])
def test_what_a_kernel_does_not_take_is_left_to_its_body(write, group):
    packed, scale = np.zeros((4, 96 // 2), np.uint8), np.ones((4, 96 // group), ml_dtypes.bfloat16)
    for dtype in ("f32", "bf16"):
        x = np.zeros((2, 96), element_type(dtype).numpy)
        module = write(lambda *operands: _linear(*operands, scaled=True), x, packed, scale)
        assert kernels.target("linear") not in str(kernels.with_kernels(module))
    x, w = np.zeros((2, 8), np.float32), np.zeros((4, 8), np.int8)
    module = write(lambda *operands: _linear(*operands, scaled=True), x, w, np.ones(4, np.float32))
    assert kernels.target("linear") not in str(kernels.with_kernels(module))
    module = write(lambda *operands: _linear(*operands), x, w.astype(np.float16))
    assert kernels.target("linear") not in str(kernels.with_kernels(module))


def test_rows_come_out_alike_in_every_company(run):
    random = np.random.default_rng(0)
    x, w = random.normal(size=(9, 100)).astype(np.float32), random.normal(size=(70, 100)).astype(np.float32)
    [together] = run(_linear, x, w)
    for row in range(9):
        [alone] = run(_linear, x[row : row + 1], w)
        assert (alone == together[row]).all()


def test_what_is_worked_out_before_is_laid_out_as_the_kernel_has_it(run):
    # XLA is free to transpose by a layout alone.
    x = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    w = np.random.default_rng(1).normal(size=(5, 40)).astype(np.float32)
    [got] = run(lambda x, w: hlo.transpose(_linear(hlo.transpose(x * 2.0, 1, 0), w), 1, 0), x, w)
    np.testing.assert_allclose(got, w @ (x * 2), rtol=1e-5, atol=1e-5)
