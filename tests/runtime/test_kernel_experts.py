"""Linear layers of experts: the kernel and the body against a plain layer for each expert."""

import functools

import numpy as np
import pytest
import torch
from levels import at_every_level

from transformers_neuronx.layers.linear import Part, _linear, _linear_body
from transformers_neuronx.pyhlo.dtypes import element_type, from_torch, to_torch, torch_to_numpy
from transformers_neuronx.runtimes import get_runtime, kernels
from transformers_neuronx.weights import panels
from transformers_neuronx.weights.quantization import Storage

pytestmark = pytest.mark.skipif(not kernels.built(), reason="the kernels were not built: they need a C++ compiler")

COUNT, INPUTS = 5, 64
STORED = [None, "s8", "s8/32, f32", "s4/32, bf16", "s4/32, f16 with minima", "s5/32, s8 x f16/64", "nf4/64, f32"]


def parts_of(stored, dtype, outputs, draw, biased=False):
    """Return the part of a stack of matrices in panels, and the attributes of its layer."""
    matrices = draw.standard_normal((COUNT, outputs, INPUTS)).astype(np.float32)
    storage = Storage("s8") if stored == "s8" else stored and Storage.of(stored)

    def stacked(made, word):
        each = [made(torch.from_numpy(matrix)) for matrix in matrices]
        laid_out = [panels.laid_out(one, word) for one in each] if word else each
        return torch_to_numpy(torch.stack(laid_out))

    bias = draw.standard_normal((COUNT, outputs)).astype(element_type(dtype).numpy) if biased else None
    attributes = dict(panels=[(outputs, INPUTS)], dtype=dtype)
    if storage is None:
        return Part(stacked(lambda matrix: matrix.to(to_torch(dtype)), panels.WORDS[dtype]), bias=bias), attributes
    values = storage.values(torch.from_numpy(matrices[0]))
    attributes["panels"] = [(outputs, values.shape[1])]
    attributes |= dict(codes="nf4") if storage.dtype == "nf4" else {}
    weight = stacked(storage.values, panels.WORDS[from_torch(values.dtype).name])
    word, kind = (1 if storage.group else None), to_torch("s8" if storage.block else storage.scale_type)
    scale = stacked(lambda matrix: storage.scales(matrix).to(kind), word)
    minimum = stacked(lambda matrix: storage.minima(matrix).to(kind), word) if storage.with_minima else None
    unit = stacked(lambda m: storage.scale_units(m).to(to_torch(storage.scale_type)), 1) if storage.block else None
    return Part(weight, scale, minimum, unit, bias=bias), attributes


def graph_of(parts, **attributes):
    """Return the operands of a layer's parts, and a function that makes parts of their tensors again."""
    places = [[name for name, array in part._asdict().items() if array is not None] for part in parts]
    operands = [getattr(part, name) for part, names in zip(parts, places, strict=True) for name in names]

    def again(tensors):
        tensors = iter(tensors)
        return [Part(**{name: next(tensors) for name in names}) for names in places]

    return operands, again


def layer_of(x, *tensors, again, attributes):
    return _linear(x, again(tensors), **attributes)


def one_by_one(write, x, experts, parts, attributes):
    """Return what plain layers give, at every level: each expert's for all rows, of which its own are kept."""
    rows = [None] * len(kernels.built().levels())
    for number in range(COUNT):
        own = [Part(*(None if array is None else array[number] for array in part)) for part in parts]
        operands, again = graph_of(own)
        layer = functools.partial(layer_of, again=again, attributes=attributes)
        program = get_runtime("cpu", 1).compile(write(layer, x, *operands))
        for level, results in enumerate(at_every_level(program, x, *operands)):
            kept = rows[level] or [np.zeros_like(result) for result in results]
            for keep, result in zip(kept, results, strict=True):
                keep[experts == number] = result[experts == number]
            rows[level] = kept
    return rows


CASES = [[2], [0, 0, 0, 0], [4, 1, 0, 4, 1, 1, 3], [-1, 5, 2, 99, 2, -7], [*range(COUNT)] * 9, [*range(COUNT)] * 17]


@pytest.mark.parametrize("numbers", CASES, ids=str)
@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.few(10)
def test_a_row_is_multiplied_by_its_experts_matrix(write, run, dtype, stored, numbers):
    """The bits are those of a plain layer, at each level of instructions. The body means the same."""
    draw = np.random.default_rng(len(numbers))
    x = draw.standard_normal((len(numbers), INPUTS)).astype(element_type(dtype).numpy)
    experts, gated = np.array(numbers, np.int32), len(numbers) % 2 == 1
    made = [parts_of(stored, dtype, 40, draw, biased=not gated) for _ in range(2 if gated else 1)]
    parts, attributes = [part for part, _ in made], made[0][1]
    attributes |= dict(panels=attributes["panels"] * len(parts), activation="silu" if gated else "")
    operands, again = graph_of(parts)

    def layer(function):
        return lambda x, experts, *tensors: function(x, again(tensors), experts, **attributes)

    program = get_runtime("cpu", 1).compile(write(layer(_linear), x, experts, *operands))
    assert program.text().count(f'"{kernels.target("linear")}"') == 1
    wanted = one_by_one(write, x, experts, parts, attributes)
    every = zip(kernels.built().levels(), at_every_level(program, x, experts, *operands), wanted, strict=True)
    for level, results, right in every:
        # AMX sums nine rows of an expert otherwise than all rows, for which weights of 8 bits in groups go into tiles.
        if (level, dtype, stored, len(numbers)) != ("amx", "bf16", "s8/32, f32", 9 * COUNT):
            np.testing.assert_array_equal(results[0], right[0])
    [body] = run(layer(_linear_body), x, experts, *operands)
    error = np.abs(body.astype(np.float64) - wanted[0][0]).max()
    assert error <= {"f32": 2e-5, "bf16": 2**-6}[dtype] * max(np.abs(wanted[0][0].astype(np.float64)).max(), 1)


def test_several_results(write):
    draw = np.random.default_rng(0)
    x, experts = draw.standard_normal((6, INPUTS)).astype(np.float32), np.array([3, 0, 3, 7, 1, 0], np.int32)
    parts = [parts_of(None, "f32", outputs, draw)[0] for outputs in (40, 17)]
    attributes, (operands, again) = dict(panels=[(40, INPUTS), (17, INPUTS)]), graph_of(parts)
    program = get_runtime("cpu", 1).compile(
        write(lambda x, experts, *tensors: _linear(x, again(tensors), experts, **attributes), x, experts, *operands)
    )
    wanted = one_by_one(write, x, experts, parts, attributes)
    for results, right in zip(at_every_level(program, x, experts, *operands), wanted, strict=True):
        for got, want in zip(results, right, strict=True):
            np.testing.assert_array_equal(got, want)
