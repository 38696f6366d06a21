"""The CPU's kernels against the bodies that they replace, for each instruction set of the processor."""

import json
import math
import os
import shutil
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from levels import at_every_level

from transformers_neuronx import hlo
from transformers_neuronx.engine.rules import Rules
from transformers_neuronx.hlo.control import CompositeCall
from transformers_neuronx.layers import ACTIVATIONS
from transformers_neuronx.layers.linear import Part, _linear, _linear_body
from transformers_neuronx.layers.norm import _layer_norm, _rms_norm
from transformers_neuronx.layers.sampling import BROKEN, _sample_body, sample
from transformers_neuronx.layers.storage import as_rounded
from transformers_neuronx.pyhlo import HloModuleProto
from transformers_neuronx.pyhlo.dtypes import element_type, from_numpy, numpy_to_torch, torch_to_numpy
from transformers_neuronx.pyhlo.hlo_pb2 import PrimitiveType, ShapeProto
from transformers_neuronx.runtimes import get_runtime, kernels
from transformers_neuronx.weights import panels
from transformers_neuronx.weights.bits import in_bytes
from transformers_neuronx.weights.quantization import Storage

TINY_KJV = Path(__file__).parents[2] / "examples" / "tiny-kjv"
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 15, 16, 17, 31, 33, 64, 81)
ALL_BUT_FINITE = (np.nan, np.inf, -np.inf)
ADDED = ' residual"'  # in the text of a program, for a linear layer whose kernel adds a residual

# Prints some logits of the bundled checkpoint, with the value of NEURONX_KERNELS.
LOGITS = """
import json, logging, sys
logging.basicConfig(format="%(message)s")
amp = sys.argv[2]
sys.modules.update(dict.fromkeys(sys.argv[3:]))  # what cannot be imported
from transformers_neuronx.config import NeuronConfig, QuantizationConfig
from transformers_neuronx.gpt2.model import GPT2ForSampling
switches = NeuronConfig(quant=QuantizationConfig("s8"), tokens_per_dispatch=0)
model = GPT2ForSampling.from_pretrained(sys.argv[1], n_positions=[16], amp=amp, neuron_config=switches)
model.to_neuron(ahead=False)
print(json.dumps([model([[5, 6, 7]]).tolist(), model.decoder.runtime.fingerprint["kernels"]]))
"""


def logits(level, *missing, amp="bf16"):
    command = [sys.executable, "-c", LOGITS, str(TINY_KJV), amp, *missing]
    environment = os.environ | dict(NEURONX_KERNELS=level, NEURONX_CACHE="off")
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_without_kernels_it_is_said_once_what_that_costs():
    ran = logits("auto", "transformers_neuronx.runtimes.kernels._kernels")
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("the kernels were not built") == 1
    values, fingerprint = json.loads(ran.stdout)
    assert fingerprint == "off"
    off = logits("off", "transformers_neuronx.runtimes.kernels._kernels")
    assert json.loads(off.stdout) == [values, "off"] and not off.stderr


pytestmark = pytest.mark.skipif(
    not (kernels.built() or shutil.which("c++")), reason="the kernels were not built: they need a C++ compiler"
)


def test_they_are_built_where_there_is_a_compiler():
    assert kernels.built(), "the kernels were not built: python setup.py build_ext --inplace"


@pytest.mark.slow
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
    assert "NEURONX_KERNELS must be auto, off, portable" in ran.stderr and "got 'sse9'" in ran.stderr


def compiled(write, graph, kernel, *operands):
    """Compile a graph, and assert that the kernel runs all of its calls."""
    return with_kernel(write(graph, *operands).SerializeToString(deterministic=True), kernel)


@lru_cache(16)
def with_kernel(data, kernel):
    module = HloModuleProto.FromString(data)
    program = get_runtime("cpu", 1).compile(module)
    calls = str(module).count(f'value: "{kernel}"')
    assert program.text().count(f'"{kernels.target(kernel)}"') == calls > 0
    return program


def laid_out(matrix, word=None):
    """Return a matrix in panels, as a parameter of a program."""
    word = word or panels.WORDS[from_numpy(matrix.dtype).name]
    return torch_to_numpy(panels.laid_out(numpy_to_torch(np.ascontiguousarray(matrix)), word))


def in_eight_bits(x, group):
    """Round x [..., inputs] to 8 bits, with a scale for each group."""
    *lead, inputs = x.shape
    groups = np.pad(x.astype(np.float32), [(0, 0)] * len(lead) + [(0, -inputs % group)]).reshape(*lead, -1, group)
    scale = np.abs(groups).max(-1, keepdims=True) * np.float32(1 / 127)
    with np.errstate(invalid="ignore"):  # what is not finite becomes NaN
        whole = np.rint(groups * (1 / np.where(scale > 1e-37, scale, np.inf)).astype(np.float32))
        return (whole * scale).reshape(*lead, -1)[..., :inputs]


def check(write, xs, wide, *weight, rounded=0, codes="", **named):
    """Compare products with NumPy in f64, within the rounding of 16-bit activations, or of sums in f32."""
    names, operands = [*Part._fields[: len(weight)], *named], [*xs, *weight, *named.values()]
    stored = 4 * weight[0].shape[1] if weight[0].dtype == np.uint8 else wide.shape[1]
    attributes = dict(panels=[(len(wide), stored)], rounded=rounded, codes=codes)
    module = write(
        lambda *tensors: [
            _linear(x, [Part(**dict(zip(names, tensors[len(xs) :], strict=True)))], **attributes)
            for x in tensors[: len(xs)]
        ],
        *operands,
    )
    program = get_runtime("cpu", 1).compile(module)
    assert program.text().count(kernels.target("linear")) == len(xs)
    for x, results in zip(xs, zip(*at_every_level(program, *operands), strict=True), strict=True):
        x = (in_eight_bits(x, rounded) if rounded else x).astype(np.float64)
        for got in results:
            finite = np.isfinite(x).all(-1)
            assert np.isnan(got[~finite]).all()
            bound = ((4e-5 * np.abs(x[finite]) + 1e-30) @ np.abs(wide).T).max(initial=0)
            assert (np.abs(got[finite] - x[finite] @ wide.T) <= bound).all()


def activations(random, dtype, inputs):
    """Return activations with many numbers of rows and shapes."""
    xs = [random.normal(size=(rows, inputs)) for rows in ROWS]
    xs += [random.normal(size=(2, 3, inputs)), np.zeros((2, inputs)), np.full((1, inputs), 1e-36)]
    return [x.astype(element_type(dtype).numpy) for x in xs]


SHAPES = [(1, 1), (7, 3), (30, 15), (31, 5), (34, 17), (64, 16), (257, 130), (544, 48), (1000, 33), (1024, 33)]


@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_linear(write, dtype, inputs, outputs):
    random = np.random.default_rng(0)
    weight = random.normal(size=(outputs, inputs)).astype(element_type(dtype).numpy)
    check(write, activations(random, dtype, inputs), weight.astype(np.float64), laid_out(weight))


@pytest.mark.parametrize("rows", [1, 17, 300])
@pytest.mark.parametrize(("inputs", "outputs"), [(31, 33), (64, 40), (290, 130)])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_what_is_not_finite_stays_where_it_is(write, dtype, inputs, outputs, rows):
    random, number = np.random.default_rng(0), element_type(dtype).numpy
    x, weight = random.normal(size=(rows, inputs)).astype(number), random.normal(size=(outputs, inputs)).astype(number)
    x[rows // 2, 0], weight[16, 0], weight[outputs - 1, -1] = np.nan, np.inf, np.nan
    program = compiled(
        write, lambda x, w: _linear(x, [Part(w)], panels=[(outputs, inputs)]), "linear", x, laid_out(weight)
    )
    wanted = x.astype(np.float64) @ weight.astype(np.float64).T
    for [got] in at_every_level(program, x, laid_out(weight)):
        assert (np.isfinite(got) == np.isfinite(wanted)).all() and (np.isnan(got) == np.isnan(wanted)).all()


@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (31, 5), (257, 130), (9000, 3)])
@pytest.mark.parametrize("x_type", ["f32", "bf16", "f16"])
def test_linear_of_eight_bits(write, x_type, inputs, outputs):
    random = np.random.default_rng(0)
    weight = random.integers(-127, 128, (outputs, inputs)).astype(np.int8)
    scale = random.random(outputs, np.float32)
    xs = activations(random, x_type, inputs)
    xs.append(np.full((1, inputs), 3).astype(xs[0].dtype))  # the largest sums
    not_finite = np.tile(np.array(ALL_BUT_FINITE)[:, None], inputs).astype(xs[0].dtype)
    wide, operands = weight.astype(np.float64) * scale[:, None], [laid_out(weight), scale]
    check(write, [*xs, not_finite] if x_type != "f32" else xs, wide, *operands)
    check(write, [*xs, not_finite], wide, *operands, rounded=32)


@pytest.mark.parametrize(
    ("group", "groups", "outputs"), [(8, 1, 1), (24, 3, 33), (32, 21, 6), (96, 5, 40), (256, 3, 17), (4096, 2, 2)]
)
@pytest.mark.parametrize("x_type", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("stored", ["s4", "s8"])
def test_linear_in_groups(write, stored, x_type, groups, outputs, group):
    random = np.random.default_rng(0)
    matrix = numpy_to_torch(random.normal(size=(outputs, groups * group)).astype(np.float32))
    storage = Storage(stored, group)
    values, scale = storage.values(matrix), storage.scales(matrix)
    scale = scale.bfloat16() if stored == "s4" else scale
    wide = as_stored(values, stored).reshape(outputs, groups, group) * scale.double().numpy()[:, :, None]
    operands = laid_out(torch_to_numpy(values)), laid_out(torch_to_numpy(scale), 1)
    fits = stored == "s4" or x_type == "f32" or group <= 512  # in 32 bits, whatever the numbers are
    for rounded in (0, group) if fits else (group,):
        xs = activations(random, x_type, groups * group)
        check(write, xs, wide.reshape(outputs, -1), *operands, rounded=rounded)


@pytest.mark.parametrize("x_type", ["bf16", "f16"])
def test_the_largest_sums_of_groups(write, x_type):
    """Activations of 16 bits and weights of 8, all as large as they can be. Larger groups are left to the body."""

    def operands(group):
        x, weight = np.full((1, group), 3).astype(element_type(x_type).numpy), np.full((16, group), 127, np.int8)
        return x, laid_out(weight), laid_out(np.ones((16, 1), np.float32), 1)

    x, *weight = operands(512)
    check(write, [x], np.full((16, 512), 127.0), *weight)
    large = operands(1024)
    graph = lambda x, *parts: _linear(x, [Part(*parts)], panels=[(16, 1024)])  # noqa: E731
    assert kernels.target("linear") not in str(kernels.with_kernels(write(graph, *large)))


@pytest.mark.parametrize("x_type", ["f32", "bf16"])
@pytest.mark.parametrize("of_groups", ["f32", "f16", "bf16"])
@pytest.mark.parametrize(
    ("stored", "group", "groups", "outputs"), [("s4", 32, 3, 33), ("s8", 16, 21, 6), ("s4", 64, 1, 1)]
)
@pytest.mark.few(7)
def test_scales_of_every_type_and_minima(write, stored, group, groups, outputs, of_groups, x_type):
    random, number = np.random.default_rng(0), element_type(of_groups).numpy
    least, most = (-8, 8) if stored == "s4" else (0, 128)
    values = random.integers(least, most, (outputs, groups * group)).astype(np.int8)
    scale, minimum = (random.normal(size=(outputs, groups)).astype(number) for _ in range(2))
    kept = torch_to_numpy(in_bytes(numpy_to_torch(values), "s4", group)) if stored == "s4" else values
    one, lowest = (np.repeat(each.astype(np.float64), group, 1) for each in (scale, minimum))
    operands = [laid_out(kept), laid_out(scale, 1), laid_out(minimum, 1)]
    xs = activations(random, x_type, groups * group)
    for rounded in (0, group):
        check(write, xs, values * one, *operands[:2], rounded=rounded)
        check(write, xs, (values - least) * one + lowest, *operands, rounded=rounded)


@pytest.mark.parametrize("x_type", ["f32", "bf16"])
@pytest.mark.parametrize("of_blocks", ["f16", "f32"])
@pytest.mark.parametrize(
    ("stored", "group", "together", "blocks", "outputs"),
    [("s4", 32, 8, 2, 33), ("s8", 16, 3, 5, 6), ("s4", 16, 1, 1, 70)],
)
@pytest.mark.few(5)
def test_scales_in_two_levels(write, stored, group, together, blocks, outputs, of_blocks, x_type):
    """Of whole numbers, and a unit for so many groups together."""
    random, number, groups = np.random.default_rng(0), element_type(of_blocks).numpy, together * blocks
    least, most = (-8, 8) if stored == "s4" else (0, 128)
    values = random.integers(least, most, (outputs, groups * group)).astype(np.int8)
    scale, minimum = (random.integers(-128, 128, (outputs, groups)).astype(np.int8) for _ in range(2))
    units = [random.normal(scale=0.01, size=(outputs, blocks)).astype(number) for _ in range(2)]
    units[0][::2, -1] *= 1e-3  # as small as they are in files: subnormal in f16
    kept = torch_to_numpy(in_bytes(numpy_to_torch(values), "s4", group)) if stored == "s4" else values
    whole = [np.repeat(each.astype(np.float64), group, 1) for each in (scale, minimum)]
    one, lowest = (
        x * np.repeat(unit.astype(np.float64), together * group, 1) for x, unit in zip(whole, units, strict=True)
    )
    weight, *parts = laid_out(kept), *(laid_out(each, 1) for each in (scale, minimum, *units))
    xs = activations(random, x_type, groups * group)
    for rounded in (0, group):
        check(write, xs, values * one, weight, scale=parts[0], scale_unit=parts[2], rounded=rounded)
        wide = (values - least) * one + lowest
        check(write, xs, wide, weight, *parts, rounded=rounded)


@pytest.mark.parametrize("x_type", ["f32", "bf16", "f16"])
@pytest.mark.parametrize(
    ("stored", "group", "groups", "outputs"),
    [
        ("s5", 32, 3, 33),
        ("s6", 16, 21, 6),
        ("s5", 64, 1, 1),
        ("s6", 48, 2, 70),
        ("s5", 1024, 2, 20),
        ("s6", 1024, 1, 3),
    ],
)
@pytest.mark.few(12)
def test_linear_of_five_and_six_bits(write, stored, group, groups, outputs, x_type):
    random, half = np.random.default_rng(0), {"s5": 16, "s6": 32}[stored]
    values = random.integers(-half, half, (outputs, groups * group)).astype(np.int8)
    values[0], values[-1, ::2] = -half, half - 1  # the largest sums
    scale, minimum = (random.normal(size=(outputs, groups)).astype(np.float32) for _ in range(2))
    weight = laid_out(torch_to_numpy(in_bytes(numpy_to_torch(values), stored, group)))
    one, lowest = (np.repeat(each.astype(np.float64), group, 1) for each in (scale, minimum))
    xs = activations(random, x_type, groups * group)
    xs.append(np.full((1, groups * group), 3).astype(xs[0].dtype))
    for rounded in (0, group):
        check(write, xs, values * one, weight, laid_out(scale, 1), rounded=rounded)
        wide = (values + half) * one + lowest
        check(write, xs, wide, weight, laid_out(scale, 1), laid_out(minimum, 1), rounded=rounded)


def as_stored(values, stored):
    """Return the whole numbers of an array. Four bytes of s4 have four inputs in their low bits, then four more."""
    bytes_of = values.numpy().view(np.int8)
    if stored == "s8":
        return bytes_of.astype(np.float64)
    four = bytes_of.reshape(len(bytes_of), -1, 1, 4)
    return np.concatenate([four << 4 >> 4, four >> 4], 2).reshape(len(bytes_of), -1).astype(np.float64)


NUMPY = dict(
    gelu=lambda x: x * (np.vectorize(math.erf)(x / math.sqrt(2)) + 1) / 2,
    gelu_new=lambda x: x * (np.tanh((x + 0.044715 * x**3) * math.sqrt(2 / math.pi)) + 1) / 2,
    relu=lambda x: np.maximum(x, 0),
    relu2=lambda x: np.maximum(x, 0) ** 2,
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
        weight = [laid_out((wide * 128).astype(np.int8)), scale] if storage == "s8" else [laid_out(wide.astype(x_type))]
        operands += [*weight, bias]
        wide = wide * scale[:, None] * 128 if storage == "s8" else wide
        wanted.append(x.astype(np.float64) @ wide.T + bias.astype(np.float64))
    matrices = [(count, 100) for count in outputs]
    each = len(operands) // len(outputs)

    def graph(x, *tensors):
        layers = [tensors[first : first + each] for first in range(0, len(tensors), each)]
        parts = [Part(*layer[:-1], bias=layer[-1]) for layer in layers]
        return _linear(x, parts, panels=matrices)

    program = compiled(write, graph, "linear", x, *operands)
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
    attributes = dict(activation=activation, panels=[(37, 64)] * (1 + gated))
    weights = [laid_out(weight) for weight in weights]
    program = compiled(write, lambda x, *w: _linear(x, [*map(Part, w)], **attributes), "linear", x, *weights)
    for [got] in at_every_level(program, x, *weights):
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("rows", [1, 3, 17])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_a_residual_is_added_by_the_kernel(write, dtype, gated, rows):
    random, number = np.random.default_rng(0), element_type(dtype).numpy
    x, residual = random.normal(size=(rows, 24)).astype(number), random.normal(size=(rows, 37)).astype(number)
    weights = [random.normal(size=(37, 24)).astype(number) for _ in range(1 + gated)]
    gate, *up = [x.astype(np.float64) @ weight.T.astype(np.float64) for weight in weights]
    wanted = residual.astype(np.float64) + (np.maximum(gate, 0) * up[0] if gated else gate)
    activation = dict(activation="relu") if gated else {}
    attributes = dict(dtype=dtype, panels=[(37, 24)] * (1 + gated), **activation)
    operands = x, residual, *map(laid_out, weights)
    graph = lambda x, residual, *weights: residual + _linear(x, [*map(Part, weights)], **attributes)  # noqa: E731
    program = compiled(write, graph, "linear", *operands)
    assert program.text().count(ADDED) == 1
    tolerance = dict(f32=1e-5, bf16=2**-7, f16=2**-10)[dtype]
    for [got] in at_every_level(program, *operands):
        np.testing.assert_allclose(got.astype(np.float64), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("graph", "residuals"),
    [
        (lambda y, z, r: r + y + z, 2),
        (lambda y, z, r: y + z, 1),  # one of them is the residual of the other
        (lambda y, z, r: y * z + r, 0),
        (lambda y, z, r: y + y, 0),
        (lambda y, z, r: (y + r) * y, 0),  # the value without the residual is used as well
    ],
)
def test_only_what_a_layer_alone_is_added_to_is_its_residual(write, graph, residuals):
    random = np.random.default_rng(0)
    x, r, a, b = (random.integers(-3, 4, shape).astype(np.float32) for shape in [(2, 4), (2, 5), (5, 4), (5, 4)])
    whole = lambda x, r, *w: graph(*(_linear(x, [Part(each)], panels=[(5, 4)]) for each in w), r)  # noqa: E731
    operands = x, r, laid_out(a), laid_out(b)
    program = get_runtime("cpu", 1).compile(write(whole, *operands))
    assert program.text().count(ADDED) == residuals
    for [got] in at_every_level(program, *operands):
        np.testing.assert_array_equal(got, graph(x @ a.T, x @ b.T, r))


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


def policies(random, rows):
    """Rules of sampling of all kinds, one for each row, and positions."""
    rules = Rules(
        random.choice([0, 1, 2, 40, 300], rows).tolist(),
        random.choice([1.0, 1.0, 0.9, 0.3], rows).tolist(),
        random.choice([1.0, 0.5, 2.0], rows).tolist(),
        random.choice([0.0, 0.0, 0.05], rows).tolist(),
        random.choice([1.0, 1.0, 0.5, 3.0], rows).tolist(),
        seed=random.integers(0, 1000, rows).tolist(),
    )
    return rules.packed(rows), random.integers(0, 1000, rows).astype(np.int32)


@pytest.mark.parametrize("vocabulary", [1, 5, 16, 50, 1003])
def test_the_likeliest_token(write, vocabulary):
    random = np.random.default_rng(0)
    logits = random.integers(-4, 5, (40, vocabulary)).astype(np.float32)  # with many ties
    logits[1:4] = [[np.nan], [np.inf], [-np.inf]]
    logits[4, : vocabulary // 2], logits[5, -1], logits[6, 0] = -np.inf, np.nan, np.inf
    seen, penalty = random.random((40, vocabulary)) < 0.5, random.choice([1, 0.5, 3], 40).astype(np.float32)
    column = penalty[:, None]
    wanted = np.where(seen, np.where(logits < 0, logits * column, logits / column), logits).argmax(-1)
    sound = np.isfinite(logits.max(-1))
    wanted[~sound] = BROKEN
    operands = [logits, seen, Rules(1, repetition_penalty=penalty.tolist()).packed(40), np.arange(40, dtype=np.int32)]
    program = compiled(write, sample, "sample", *operands)
    for [got] in at_every_level(program, *operands):
        assert got.tolist() == wanted.tolist()
    operands[2] = Rules(0, repetition_penalty=penalty.tolist(), seed=1).packed(40)
    for [got] in at_every_level(program, *operands):
        assert ((got == BROKEN) == ~sound).all()


@pytest.mark.parametrize("vocabulary", [1, 7, 50, 1003, 40_000])
@pytest.mark.few(2)
def test_sampled_tokens_are_those_of_the_body(write, vocabulary):
    random = np.random.default_rng(vocabulary)
    logits = random.normal(scale=3, size=(64, vocabulary)).astype(np.float32)
    logits[::4] = logits[::4].round()  # with many ties
    logits[::5, vocabulary // 2 + 1 :] = -np.inf
    operands = logits, random.random(logits.shape) < 0.3, *policies(random, 64)
    runtime = get_runtime("cpu", 1)
    [wanted] = runtime.compile(write(_sample_body, *operands))(*(runtime.put([operand]) for operand in operands))
    wanted = wanted.numpy().tolist()
    for [got] in at_every_level(compiled(write, sample, "sample", *operands), *operands):
        assert got.tolist() == wanted
    assert vocabulary < 1000 or len(set(wanted)) > 40


def test_what_a_kernel_does_not_take_is_left_to_its_body(write):
    def taken(x, weight, *scale, matrix):
        attributes = dict(panels=[matrix]) if matrix else {}
        module = write(lambda x, *operands: _linear(x, [Part(*operands)], **attributes), x, weight, *scale)
        return kernels.target("linear") in str(kernels.with_kernels(module))

    x, half = np.zeros((2, 8192), np.float32), np.zeros((2, 8192), np.float16)
    eight = laid_out(np.zeros((4, 8192), np.int8))
    assert taken(x, eight, np.ones(4, np.float32), matrix=(4, 8192))
    assert not taken(x, np.zeros((4, 8192), np.int8), np.ones(4, np.float32), matrix=None)
    assert not taken(x, laid_out(half), matrix=(2, 8192))
    for groups in (1, 4096):
        scale = laid_out(np.ones((4, groups), np.float32), 1)
        assert not taken(x, eight, scale, matrix=(4, 8192))


def test_a_kernel_takes_whole_groups_alone():
    """Checked with shapes alone: the body could not be written for the refused one."""
    for inputs, taken in ((96, True), (98, False)):
        sizes = ("F32", [1, inputs]), ("S8", [1, 24, 16, 4]), ("F32", [1, 3, 16, 1])
        shapes = [ShapeProto(element_type=PrimitiveType.Value(name), dimensions=shape) for name, shape in sizes]
        call = CompositeCall("linear", {"x": 1, "parts.0.weight": 2, "parts.0.scale": 3}, dict(rounded=0))
        assert kernels.serves(call, shapes) == taken


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("inputs", [1, 32, 100])
def test_the_body_rounds_alike(run, inputs, dtype):
    x = np.random.default_rng(0).normal(size=(2, 5, inputs)).astype(element_type(dtype).numpy)
    x[0, 0], x[0, 1] = 0, 1e-36
    [got] = run(lambda x: as_rounded(x, 32), x)
    np.testing.assert_allclose(got, in_eight_bits(x, 32), rtol=1e-6, atol=1e-37)


@pytest.mark.parametrize("stored", ["f32", "s8", "s4", "minima"])
@pytest.mark.parametrize("rows", [1, 3])
def test_the_body_reads_panels_as_well(run, stored, rows):
    random = np.random.default_rng(0)
    x, matrix = random.normal(size=(rows, 48)).astype(np.float32), random.normal(size=(21, 48)).astype(np.float32)
    if stored == "f32":
        operands, plain = [laid_out(matrix)], [matrix]
    else:
        storage = Storage("s4" if stored == "minima" else stored, 16)
        values, scale = (torch_to_numpy(f(numpy_to_torch(matrix))) for f in (storage.values, storage.scales))
        operands, plain = [laid_out(values), laid_out(scale, 1)], [values, scale]
        if stored == "minima":
            operands.append(laid_out(scale / 2, 1))
            plain.append(scale / 2)
    [got] = run(lambda x, *o: _linear_body(x, [Part(*o)], panels=[plain[0].shape]), x, *operands)
    [wanted] = run(lambda x, *o: _linear_body(x, [Part(*o)]), x, *plain)
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_rows_come_out_alike_in_every_company(run, dtype):
    random, number = np.random.default_rng(0), element_type(dtype).numpy
    x, w = random.normal(size=(90, 300)).astype(number), random.normal(size=(70, 300)).astype(number)
    graph = lambda x, w: _linear(x, [Part(w)], panels=[(70, 300)])  # noqa: E731
    [together] = run(graph, x, laid_out(w))
    for count in (1, 35):
        for row in range(0, 91 - count, count):
            [fewer] = run(graph, x[row : row + count], laid_out(w))
            assert (fewer == together[row : row + count]).all()


@pytest.mark.parametrize("group", [0, 64, 256])
@pytest.mark.parametrize("x_type", ["bf16", "f16"])
def test_rows_of_eight_bits_come_out_alike_in_every_company_and_with_tiles(write, x_type, group):
    """Sums are exact, so it does not matter who adds what first."""
    random, inputs = np.random.default_rng(0), 3 * group if group else 300
    x = random.normal(size=(90, inputs)).astype(element_type(x_type).numpy)
    weight = laid_out(random.integers(-127, 128, (70, inputs)).astype(np.int8))
    scale = random.random((70, inputs // group) if group else 70, np.float32)
    scale = laid_out(scale, 1) if group else scale
    graph = lambda x, *parts: _linear(x, [Part(*parts)], panels=[(70, inputs)])  # noqa: E731
    found = {}
    for count in (90, 35, 1):
        program = compiled(write, graph, "linear", x[:count], weight, scale)
        for first in range(0, 91 - count, count):
            given = x[first : first + count], weight, scale
            for level, [got] in zip(kernels.built().levels(), at_every_level(program, *given), strict=True):
                wanted = found.setdefault(level, got)
                assert (got == wanted[first : first + count]).all()
    if "amx" in found:
        assert (found["amx"] == found["avx512_bf16"]).all()


@pytest.mark.parametrize("stored", ["s4", "s5", "s6", "s8"])
def test_few_rows_of_few_bits_come_out_alike_in_every_company(write, stored):
    """Some levels multiply activations of few rows in two bytes, and those of more rows whole."""
    random, inputs = np.random.default_rng(0), 160
    x = random.normal(size=(8, inputs)).astype(element_type("bf16").numpy)
    most = 2 ** (int(stored[1]) - 1)
    values = random.integers(-most, most, (70, inputs)).astype(np.int8)
    kept = values if stored == "s8" else torch_to_numpy(in_bytes(numpy_to_torch(values), stored, 32))
    weight, shape = laid_out(kept), (70, inputs // 32)
    scale, minimum = (laid_out(random.normal(size=shape).astype(np.float32), 1) for _ in range(2))
    stored_inputs = inputs if stored == "s8" else 4 * weight.shape[1]
    graph = lambda x, *parts: _linear(x, [Part(*parts)], panels=[(70, stored_inputs)])  # noqa: E731
    found = {}
    for count in (8, 5, 4, 1):
        program = compiled(write, graph, "linear", x[:count], weight, scale, minimum)
        for first in range(0, 9 - count, count):
            given = x[first : first + count], weight, scale, minimum
            for level, [got] in zip(kernels.built().levels(), at_every_level(program, *given), strict=True):
                assert (got == found.setdefault(level, got)[first : first + count]).all()


@pytest.mark.parametrize(
    ("stored", "group", "groups"),
    [
        ("s4", 16, 21),
        ("s6", 16, 21),
        ("s8", 16, 21),
        *((each, *sizes) for each in ("s4", "s5", "s6", "s8") for sizes in ((32, 11), (96, 3), (512, 1))),
    ],
)
def test_many_rows_of_few_bits_come_out_alike_in_every_company(write, stored, group, groups):
    """With tiles, too, if there are at least so many that all numbers of rows use them. One row is not finite."""
    random, inputs, most = np.random.default_rng(0), group * groups, 2 ** (int(stored[1]) - 1)
    x = random.normal(size=(51, inputs)).astype(np.float32)
    x[3, 1], x[20, -1] = np.inf, np.nan
    x = x.astype(element_type("bf16").numpy)
    values = random.integers(-most, most, (70, inputs)).astype(np.int8)
    weight = laid_out(values if stored == "s8" else torch_to_numpy(in_bytes(numpy_to_torch(values), stored, group)))
    scale, minimum = (random.normal(size=(70, groups)).astype(np.float32) for _ in range(2))
    above = values.astype(int) + (0 if stored == "s8" else most)  # what stands for the minimum
    wide = above * np.repeat(scale.astype(np.float64), group, 1) + np.repeat(minimum, group, 1)
    check(write, [x, x[:17]], wide, weight, laid_out(scale, 1), laid_out(minimum, 1))
    graph = lambda x, *parts: _linear(x, [Part(*parts)], panels=[(70, 4 * weight.shape[1])])  # noqa: E731
    found = {}
    for count in (51, 34, 17):
        program = compiled(write, graph, "linear", x[:count], weight, laid_out(scale, 1), laid_out(minimum, 1))
        for first in range(0, 52 - count, 17):
            given = x[first : first + count], weight, laid_out(scale, 1), laid_out(minimum, 1)
            for level, [got] in zip(kernels.built().levels(), at_every_level(program, *given), strict=True):
                np.testing.assert_array_equal(got, found.setdefault(level, got)[first : first + count])


def test_what_is_worked_out_before_is_laid_out_as_the_kernel_has_it(run):
    # XLA may transpose by changing a layout alone.
    x = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    w = np.random.default_rng(1).normal(size=(5, 40)).astype(np.float32)
    twice = lambda x: hlo.transpose(x * 2.0, 1, 0)  # noqa: E731
    graph = lambda x, w: hlo.transpose(_linear(twice(x), [Part(w)], panels=[(5, 40)]), 1, 0)  # noqa: E731
    [got] = run(graph, x, laid_out(w))
    np.testing.assert_allclose(got, w @ (x * 2), rtol=1e-5, atol=1e-5)
