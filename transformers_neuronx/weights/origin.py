"""Marks that tell checkpoints of one shape apart: each tensor gets a mark while it is read.

A mark is a digest of some of a tensor's numbers, so that another checkpoint can be compared without reading it whole.
It covers all of a tensor of up to 16,384 numbers, and 16 runs of 1024 of a larger one, spread from its first number
to its last. For Llama-3-8B in bf16 that is 0.05 % of the numbers, in 21 MB of 16 GB.

A copy that was trained further has other marks, even if 999 of 1000 numbers are unchanged after rounding. So does a
copy with adapters merged into some of its tensors. A change of a few numbers or rows of a large tensor may be missed,
for example that of one token's row in the embedding; `transformers-neuronx check` compares all bits.
Numbers are compared as f32. So one checkpoint has the same marks in every file format, and in every type that holds
its numbers. Of matrices in few bits, stored numbers are compared, without their scales. Tensors whose names differ
between two checkpoints, such as stacked experts, are not compared.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import mmap
from collections.abc import Iterable

import torch

from transformers_neuronx.weights.checkpoint import Checkpoint
from transformers_neuronx.weights.packed import Packed, PackedReaders, Unread

RUNS, NUMBERS = 16, 1024

Marks = dict[str, str]  # name of a tensor in a checkpoint of the bare model -> its mark


class Marked(Checkpoint):
    """A checkpoint that records the mark of each tensor it reads. The bare model's names lack `prefix`."""

    def __init__(self, checkpoint: Checkpoint, prefix: str) -> None:
        super().__init__(checkpoint.directory, dict.fromkeys(checkpoint.names, checkpoint.read))
        self.marks: Marks = {}
        self._checkpoint = checkpoint
        self._prefix = prefix

    @property
    def packed_readers(self) -> PackedReaders:
        return self._checkpoint.packed_readers

    def read(self, name: str) -> torch.Tensor:
        tensor = super().read(name)
        if name not in self.packed_readers:
            self._note(name, tensor)
        return tensor

    def _note(self, name: str, tensor: torch.Tensor | Packed | Unread) -> None:
        if (bare := name.removeprefix(self._prefix)) not in self.marks:
            self.marks[bare] = mark(tensor)

    def in_few_bits(self, name: str) -> Packed | Unread | None:
        few = self._checkpoint.in_few_bits(name)
        if few is not None:
            self._note(name, few)
        return few

    def shape(self, name: str) -> tuple[int, ...]:
        return self._checkpoint.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self._checkpoint.dtype(name)


def marks_in(checkpoint: Checkpoint, names: Iterable[str], prefix: str) -> Marks:
    """Return the marks of those of the named tensors that the checkpoint has.

    Reads only the pages of the runs; of a matrix in few bits that must be unpacked as a whole, all.
    """
    found = {name.removeprefix(prefix): name for name in checkpoint}
    marks = {}
    for name in names:
        if name in found:
            few = checkpoint.in_few_bits(found[name])
            tensor = checkpoint.read(found[name]) if few is None else few
            if not isinstance(tensor, Unread):
                for run in _runs(tensor)[1]:
                    _announce(run)
            marks[name] = mark(tensor)
    return marks


def mark(tensor: torch.Tensor | Packed | Unread) -> str:
    """Return a digest of the tensor's sizes and of runs of its numbers."""
    sizes, runs = _runs(tensor)
    digest = hashlib.sha256(str(sizes).encode())
    for run in runs:
        digest.update(run.float().numpy().tobytes())
    return digest.hexdigest()[:16]


def _runs(tensor: torch.Tensor | Packed | Unread) -> tuple[list[int], list[torch.Tensor]]:
    """Return the sizes of a tensor, and the runs of its numbers."""
    if isinstance(tensor, Unread):
        return [*tensor.sizes], _runs_of_outputs(tensor)
    tensor = tensor.values if isinstance(tensor, Packed) else tensor
    flat = tensor.reshape(-1)
    return [*tensor.shape], [flat[start : start + count] for start, count in _places(len(flat))]


def _places(numbers: int) -> list[tuple[int, int]]:
    """Return where runs of so many numbers begin, and how long they are."""
    if numbers <= RUNS * NUMBERS:
        return [(0, numbers)]
    last = numbers - NUMBERS  # where the last run begins
    return [(last * run // (RUNS - 1), NUMBERS) for run in range(RUNS)]


def _runs_of_outputs(matrix: Unread) -> list[torch.Tensor]:
    """Read only the outputs that the runs are in."""
    outputs, inputs = matrix.sizes
    places = _places(outputs * inputs)
    within = [range(start // inputs, -(-(start + count) // inputs)) for start, count in places]
    values = matrix.outputs(torch.tensor([number for numbers in within for number in numbers])).values.reshape(-1)
    runs, first = [], 0
    for (start, count), numbers in zip(places, within, strict=True):
        at = first + start - numbers.start * inputs
        runs.append(values[at : at + count])
        first += len(numbers) * inputs
    return runs


def _announce(run: torch.Tensor) -> None:
    """Request the run's pages. On a plain access, systems read ahead in the file, some of them by megabytes."""
    if hasattr(mmap, "MADV_WILLNEED"):
        start = run.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        size = run.data_ptr() + run.nbytes - start
        _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_WILLNEED)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
