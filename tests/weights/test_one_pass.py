"""What devices have of a matrix: made some outputs at a time, it is what the whole matrix gives."""

import numpy as np
import pytest
import torch
from gguf_files import PACKED, drawn

from transformers_neuronx.config.gguf import STORED
from transformers_neuronx.pyhlo.dtypes import to_torch
from transformers_neuronx.weights import loops, one_pass, panels
from transformers_neuronx.weights.bits import BITS, in_bytes
from transformers_neuronx.weights.gguf_blocks import packed
from transformers_neuronx.weights.layouts import as_is, pairs_as_halves, part, transposed
from transformers_neuronx.weights.one_pass import Stored, arrays_of
from transformers_neuronx.weights.origin import mark
from transformers_neuronx.weights.packed import Unread, chosen
from transformers_neuronx.weights.quantization import Storage
from transformers_neuronx.weights.splits import Heads, Split

OUTPUTS, INPUTS = 72, 768
OF_HEADS = Heads(12, 3, 6)  # of 6 outputs
BY_HEADS = Heads(3, 3, 256)  # of 256 inputs
SPLITS = {
    "whole": None,
    "outputs": Split(0),
    "heads": OF_HEADS.split(0),
    "inputs": Split(1, 256),
    "heads of inputs": BY_HEADS.split(1),
}


def matrices(kind):
    """The same matrix as it is in a file, and as it is once read."""
    rows = torch.from_numpy(drawn(kind, (OUTPUTS, INPUTS), np.random.default_rng(5)))
    unread = Unread((OUTPUTS, INPUTS), lambda numbers: packed(kind, rows[numbers]))
    return unread, unread.whole()


def parts_of(storage):
    """What is stored of a matrix: the name, the type, the inputs that an element covers, and the word of panels."""
    scale = storage.scale_type if storage.block is None else "s8"
    named = [("values", "u8" if storage.packed else storage.dtype, 8 // BITS.get(storage.dtype, 8), 4)]
    named += [("scales", scale, storage.group, 1)] + [("minima", scale, storage.group, 1)] * storage.with_minima
    named += [("scale_units", storage.scale_type, storage.block, 1)] * (storage.block is not None)
    return [(name, to_torch(dtype), inputs, word) for name, dtype, inputs, word in named]


def cut_by(split, inputs):
    """The split of an array whose elements each cover so many inputs."""
    if split is None or split.axis == 0:
        return split
    return type(split)(**{**vars(split), "unit": split.unit // inputs})


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0"])
def test_devices_have_what_the_whole_matrix_gives(kind, split, degree, monkeypatch):
    split, storage = SPLITS[split], Storage.of(str(STORED[kind]))
    monkeypatch.setattr(one_pass, "AT_ONCE", 16 * INPUTS)
    for layout in (as_is, part(1, 2), pairs_as_halves(6, 4)):
        for matrix in matrices(kind):
            whole = matrix.outputs(chosen(matrix, layout))
            wanted, expected = [], []
            for name, dtype, inputs, word in parts_of(storage):
                stored, own = getattr(storage, name)(whole), cut_by(split, inputs)
                pieces = own.cut(stored, degree) if own else [stored]
                laid = [panels.laid_out(piece, word, dtype) for piece in pieces]
                wanted.append(Stored(getattr(storage, name), own, tuple(laid[0].shape), word, dtype))
                expected.append(laid)
            found = arrays_of(matrix, layout, wanted, degree, None)
            for arrays, laid in zip(found, expected, strict=True):
                assert len(arrays) == len(laid) == (degree if split else 1)
                assert all(
                    one.dtype == other.dtype and one.equal(other) for one, other in zip(arrays, laid, strict=True)
                )
            if split:
                here = arrays_of(matrix, layout, wanted, degree, range(degree - 1, degree))
                assert all(one.equal(arrays[-1]) for [one], arrays in zip(here, found, strict=True))


@pytest.mark.parametrize("word", [None, 4])
def test_numbers_are_rounded_as_in_the_whole_matrix(word, monkeypatch):
    """Scales of whole outputs have one dimension. Without panels, arrays are as stored."""
    monkeypatch.setattr(one_pass, "AT_ONCE", 16 * INPUTS)
    storage, matrix = Storage("s8"), torch.randn(INPUTS, 37, generator=torch.Generator().manual_seed(0))
    values, scales = storage.values(matrix.T), storage.scales(matrix.T)
    laid = panels.laid_out(values, word) if word else values
    wanted = [
        Stored(storage.values, None, tuple(laid.shape), word, torch.int8),
        Stored(storage.scales, None, (37,), None, torch.float32),
    ]
    [[found], [of_outputs]] = arrays_of(matrix, transposed, wanted, 2, None)
    assert found.equal(laid) and of_outputs.equal(scales)


def test_a_device_may_have_only_padding():
    matrix, storage = torch.ones(2, 32), Storage("s8", 32)
    wanted = [Stored(storage.values, Split(0, 2), (1, 8, 16, 4), 4, torch.int8)]
    [arrays] = arrays_of(matrix, as_is, wanted, 3, None)
    assert [int(array.count_nonzero()) for array in arrays] == [64, 0, 0]


@pytest.mark.parametrize("kind", PACKED)
def test_marks_are_those_of_the_whole_matrix(kind):
    unread, whole = matrices(kind)
    asked = []
    counted = Unread(unread.sizes, lambda numbers: asked.append(len(numbers)) or unread.outputs(numbers))
    assert mark(counted) == mark(whole) == mark(whole.values)
    assert 0 < sum(asked) < OUTPUTS


# Loops that are compiled return what the operations of PyTorch do.


@pytest.fixture
def without_loops(monkeypatch):
    """Run a function once more, without the loops."""
    assert loops.built(), "the loops were not built: python setup.py build_ext --inplace"

    def run(function, *arguments):
        with monkeypatch.context() as inside:
            inside.setattr(loops, "built", lambda: None)
            return function(*arguments)

    return run


@pytest.mark.parametrize("kind", PACKED)
def test_loops_unpack_blocks(kind, without_loops):
    rows = torch.from_numpy(drawn(kind, (37, 768), np.random.default_rng(4)))
    one, other = packed(kind, rows), without_loops(packed, kind, rows)
    assert one.values.equal(other.values) and one.scales.equal(other.scales)
    assert (one.minima is None) == (other.minima is None) and (one.minima is None or one.minima.equal(other.minima))
    for mine, its in zip(one.levels, other.levels, strict=True):
        assert mine.whole.equal(its.whole) and mine.whole.dtype == its.whole.dtype and mine.units.equal(its.units)


@pytest.mark.parametrize("dtype", BITS)
def test_loops_put_numbers_into_bytes(dtype, without_loops):
    half = 1 << (BITS[dtype] - 1)
    values = torch.randint(-half, half, (9, 96), generator=torch.Generator().manual_seed(0), dtype=torch.int8)
    for given in (values, values[:, 32:], values.T.contiguous().T):
        assert in_bytes(given, dtype, 32).equal(without_loops(in_bytes, given, dtype, 32))


@pytest.mark.parametrize(("dtype", "word"), [(name, word) for name, word in panels.WORDS.items()] + [("s8", 1)])
def test_loops_put_rows_into_panels(dtype, word, without_loops):
    drawn_bytes = torch.randint(0, 120, (37, 64), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    matrix = drawn_bytes.view(to_torch(dtype))
    for given in (matrix, matrix[:, :8], matrix[:, :7]):
        one, other = panels.laid_out(given, word), without_loops(panels.laid_out, given, word)
        assert one.view(torch.uint8).equal(other.view(torch.uint8))


def test_loops_refuse_arrays_that_do_not_fit(without_loops):
    library, empty = loops.built(), np.empty(0, np.uint8)
    block, values = np.zeros(18, np.uint8), np.zeros(32, np.uint8)
    library.unpacked("Q4_0", 8, block, values, empty, empty)
    with pytest.raises(ValueError, match="expected an array of 32 bytes, got 31"):
        library.unpacked("Q4_0", 8, block, values[:31], empty, empty)
    with pytest.raises(ValueError, match="expected an array of 0 bytes, got 32"):
        library.unpacked("Q4_0", 8, block, values, values, empty)
    with pytest.raises(ValueError, match="expected an array of 0 bytes, got 17"):
        library.unpacked("Q4_0", 8, block[:17], values, empty, empty)
    with pytest.raises(ValueError, match="no type is called Q9"):
        library.unpacked("Q9", 8, block, values, empty, empty)
    with pytest.raises(ValueError, match="expected 4 to 6 bits, got 7"):
        library.packed(7, values, values)
    with pytest.raises(ValueError, match="expected an array of 16 bytes, got 32"):
        library.packed(4, values, values.copy())
    with pytest.raises(ValueError, match="expected at most 16 outputs, got 17"):
        library.in_panels(17, 2, 1, values, values.copy())
    with pytest.raises(ValueError, match="expected words of 1, 2 or 4 bytes, got 2 of 3"):
        library.in_panels(1, 2, 3, values, values.copy())
