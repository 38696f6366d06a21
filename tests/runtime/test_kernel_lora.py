"""The kernel of adapters against NumPy, for each instruction set of the processor."""

import numpy as np
import pytest
from levels import at_every_level

from transformers_neuronx.layers.lora import _lora, _lora_body
from transformers_neuronx.pyhlo.dtypes import element_type
from transformers_neuronx.runtimes import get_runtime, kernels

pytestmark = pytest.mark.skipif(not kernels.built(), reason="the kernels were not built: they need a C++ compiler")

# Rows, tokens of each, inputs, outputs, adapters, rank: whole vectors and parts of them, many rows and one.
SIZES = [
    (1, 1, 64, 256, 1, 8),
    (5, 1, 33, 7, 3, 4),
    (3, 4, 100, 300, 4, 11),
    (40, 1, 128, 64, 2, 16),
    (2, 3, 1, 1, 2, 1),
]


def drawn(sizes, dtype, result):
    rows, tokens, inputs, outputs, count, rank = sizes
    draw = np.random.default_rng(rows)
    shapes = (rows, tokens, outputs), (rows, tokens, inputs), (count * rank, inputs), (count * rank, outputs)
    kinds = zip(shapes, (result, dtype, dtype, dtype), strict=True)
    arrays = [draw.standard_normal(shape).astype(element_type(kind).numpy) for shape, kind in kinds]
    return [*arrays, draw.integers(-1, count, rows).astype(np.int32)]


def wanted(y, x, a, b, adapters, rank):
    """y plus x aᵀ b of each row's adapter, in f64."""
    y, x, a, b = (each.astype(np.float64) for each in (y, x, a, b))
    for row, adapter in enumerate(adapters):
        if 0 <= adapter < len(a) // rank:
            own = slice(adapter * rank, (adapter + 1) * rank)
            y[row] += x[row] @ a[own].T @ b[own]
    return y


@pytest.mark.parametrize("kinds", [("f32", "f32"), ("bf16", "bf16"), ("f16", "f16"), ("bf16", "f32")], ids="-".join)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_it_adds_what_the_adapter_of_each_row_makes(write, sizes, kinds):
    operands, rank = drawn(sizes, *kinds), sizes[-1]
    module = write(lambda *tensors: _lora(*tensors, rank=rank), *operands)
    program = get_runtime("cpu", 1).compile(module)
    assert program.text().count(f'"{kernels.target("lora")}"') == 1
    right = wanted(*operands, rank)
    rounding = {"f32": 1e-6, "bf16": 2**-8, "f16": 2**-11}[kinds[1]]
    for [result] in at_every_level(program, *operands):
        error = np.abs(result.astype(np.float64) - right).max()
        assert error <= rounding * np.abs(right).max()


@pytest.mark.parametrize("sizes", SIZES[:3], ids=str)
def test_the_body_means_the_same(write, run, sizes):
    operands, rank = drawn(sizes, "f32", "f32"), sizes[-1]
    right = wanted(*operands, rank)
    result = run(lambda *tensors: _lora_body(*tensors, rank=rank), *operands)
    assert np.abs(result - right).max() <= 1e-6 * np.abs(right).max()


def test_a_row_does_not_depend_on_its_neighbours(write):
    """Bits are the same in a step of other rows; without an adapter nothing changes."""
    sizes = (9, 1, 70, 90, 3, 8)
    y, x, a, b, _ = drawn(sizes, "f32", "f32")
    adapters = np.array([0, 1, 2, -1, 2, 0, -7, 3, 1], np.int32)

    def program(rows):
        arrays = y[rows], x[rows], a, b, adapters[rows]
        compiled = get_runtime("cpu", 1).compile(write(lambda *tensors: _lora(*tensors, rank=8), *arrays))
        return [result for [result] in at_every_level(compiled, *arrays)]

    together = program(np.arange(9))
    for row in range(9):
        for alone, all_rows in zip(program(np.array([row])), together, strict=True):
            assert np.array_equal(alone[0], all_rows[row])
    for none in (3, 6, 7):
        assert np.array_equal(together[0][none], y[none])
