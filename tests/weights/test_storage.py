"""How matrices are stored in fewer bits: what is stored of numbers, and of matrices that are in few bits already."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from gguf_files import PACKED, SCALES, drawn

from transformers_neuronx.config.gguf import STORED
from transformers_neuronx.layers.storage import numbers
from transformers_neuronx.pyhlo.dtypes import torch_to_numpy
from transformers_neuronx.weights.bits import BITS, in_bytes, together
from transformers_neuronx.weights.gguf_blocks import packed
from transformers_neuronx.weights.packed import Levels
from transformers_neuronx.weights.quantization import Storage

TEXTS = sorted({str(stored) for stored in STORED.values()})


def parts_of(storage, matrix):
    """Return what is stored of a matrix, under the names that `layers.storage.numbers` has for it."""
    kept = dict(values=storage.values(matrix), scale=storage.scales(matrix))
    if storage.with_minima:
        kept |= dict(minimum=storage.minima(matrix))
    if storage.block:
        kept |= dict(scale_unit=storage.scale_units(matrix))
        kept |= dict(minimum_unit=storage.minimum_units(matrix)) if storage.with_minima else {}
    return {name: torch_to_numpy(part) for name, part in kept.items()}


def dequantized(run, parts, inputs=768):
    def graph(*tensors):
        return numbers(dtype="f32", inputs=inputs, **dict(zip(parts, tensors, strict=True)))

    return run(graph, *parts.values())[0]


@pytest.mark.parametrize("kind", SCALES)
def test_matrices_of_files_are_stored_without_rounding(run, kind):
    matrix = packed(kind, torch.from_numpy(drawn(kind, (5, 768), np.random.default_rng(3))))
    parts = parts_of(Storage.of(str(STORED[kind])), matrix)
    np.testing.assert_array_equal(dequantized(run, parts).view(np.int32), matrix.numbers.numpy().view(np.int32))


@pytest.mark.parametrize("kind", [kind for kind in PACKED if STORED[kind].block])
@pytest.mark.parametrize("sizes", [(8, 64), (16, 128)])
def test_smaller_groups_and_blocks_repeat_what_larger_ones_have(run, kind, sizes):
    matrix = packed(kind, torch.from_numpy(drawn(kind, (5, 768), np.random.default_rng(3))))
    """Numbers of 5 and 6 bits become s8 if groups are too small for them."""
    stored, (group, block) = STORED[kind], sizes
    fits = group % together(stored.dtype) == 0
    parts = parts_of(Storage(stored.dtype if fits else "s8", group, True, stored.scales, stored.minima, block), matrix)
    assert parts["values"].dtype == (np.uint8 if fits else np.int8)
    assert parts["scale"].shape == (5, 768 // group) and parts["scale_unit"].shape == (5, 768 // block)
    np.testing.assert_array_equal(dequantized(run, parts).view(np.int32), matrix.numbers.numpy().view(np.int32))


@pytest.mark.parametrize("text", TEXTS)
def test_numbers_are_rounded_nearly_as_well_in_two_levels_as_with_scales_in_f32(run, text):
    """Numbers whose sizes differ from group to group, one that is all zeros, and one that is larger than all others."""
    random, storage = np.random.default_rng(0), Storage.of(text)
    matrix = random.normal(size=(9, 768)) * np.exp(random.normal(size=(9, 96)).repeat(8, 1)) + 0.3
    matrix[3, 64:96], matrix[4] = 0, 0
    matrix = torch.from_numpy(matrix).float()
    errors = []
    for each in (storage, replace(storage, scale_type="f32", block=None)):
        got = dequantized(run, parts_of(each, matrix))
        assert (got[3, 64:96] == 0).all() and (got[4] == 0).all()
        errors.append(np.sqrt(np.square(got - matrix.numpy()).mean()))
    assert 0 < errors[0] < 1.05 * errors[1]


@pytest.mark.parametrize("dtype", BITS)
def test_bits_in_bytes(dtype):
    """Number by number, as the kernel's source describes it."""
    random, bits = np.random.default_rng(0), BITS[dtype]
    values = random.integers(-(1 << bits - 1), 1 << bits - 1, (3, 64))
    got = torch_to_numpy(in_bytes(torch.from_numpy(values).to(torch.int8), dtype, 32))
    size = together(dtype) if bits > 4 else 8  # inputs that are together, and the bytes of their low bits
    blocks = got.reshape(3, -1, size * bits // 8)
    assert got.shape == (3, 64 * bits // 8) and got.dtype == np.uint8
    for place in range(64):
        at = place % size
        low = blocks[:, place // size, at // 8 * 4 + at % 4] >> (4 if at % 8 >= 4 else 0) & 15
        if bits == 4:
            found = low.astype(int) - 16 * (low >= 8)
        else:
            high = blocks[:, place // size, size // 2 + at % 4] >> (at // 4 * (bits - 4)) & (1 << bits - 4) - 1
            found = (low | high << 4).astype(int) - (1 << bits - 1)
        assert found.tolist() == values[:, place].tolist()


def test_scales_in_two_levels():
    scales = torch.tensor([[1.0, -2.0, 0.5, 0.0, 0.0, 254.0, 2.0]])
    whole, units, block = Levels.of(scales, 16, 64, torch.float16)
    assert whole.tolist() == [[64, -127, 32, 0, 0, 127, 1]] and block == 64
    assert units.tolist() == [[float(np.float16(2 / 127)), 2.0]]
    assert Levels(whole, units, block).numbers(16)[0, 4:].tolist() == [0.0, 254.0, 2.0]
