"""Reads the rows of the table from a checkpoint: finds each weight by name, lays it out, and divides it."""

from __future__ import annotations

import functools
import logging
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from transformers_neuronx.errors import CheckpointError
from transformers_neuronx.pyhlo.dtypes import to_torch
from transformers_neuronx.weights import panels
from transformers_neuronx.weights.checkpoint import Checkpoint
from transformers_neuronx.weights.layouts import Layout
from transformers_neuronx.weights.one_pass import Stored, arrays_of
from transformers_neuronx.weights.packed import Packed, Store, Unread
from transformers_neuronx.weights.rows import ORDER, Weight
from transformers_neuronx.weights.splits import Split

_LOG = logging.getLogger(__name__)

Key = tuple[int | None, str]  # the layer, or None for a weight outside the layers, and the weight's name


def expand(table: Sequence[Weight], kinds: Sequence[str]) -> Iterator[tuple[Key, Weight]]:
    """Iterate over all weights of the model, whose layers are of these kinds."""
    for row in table:
        for layer in row.numbers(kinds) if row.layered else [None]:
            yield (layer, row.name), row if layer is None else row.at(layer)


def resolve(
    table: Sequence[Weight], kinds: Sequence[str], checkpoint: Checkpoint, prefix: str, ignored: Sequence[str]
) -> dict[Key, Weight]:
    """Return the table's rows with `source` set to the names in `checkpoint`. Reads headers only.

    A checkpoint of the bare model lacks `prefix`. `ignored` are patterns of names to skip. Raises CheckpointError with
    all weights that are missing, have the wrong shape, or are left over.
    """
    found: dict[Key, Weight] = {}
    missing: list[str] = []
    misshapen: list[str] = []
    for key, row in expand(table, kinds):
        if row.value is not None:
            found[key] = row
            continue
        names = [name for full in row.source.split("|") for name in (full, full.removeprefix(prefix))]
        named = [replace(row, source=name) for name in names]
        own = next((row for row in named if any(name in checkpoint for name in row.sources)), None)
        if own is None and row.absent is not None:
            found[key] = replace(row, value=row.absent)
            continue
        if own is None:
            missing.append(row.source)
            continue
        missing += [name for name in own.sources if name not in checkpoint]
        found[key] = own
        misshapen += _misshapen(own, checkpoint)
    used = {source for row in found.values() if row.value is None for source in row.sources}
    extra = [n for n in checkpoint if n not in used and not any(re.fullmatch(pattern, n) for pattern in ignored)]
    complaints = [
        f"{what} {collapsed(names)}"
        for what, names in (("lacks", missing), ("has the wrong shape for", misshapen), ("has unexpected", extra))
        if names
    ]
    if complaints:
        raise CheckpointError(f"the checkpoint {checkpoint.directory} does not fit the model: {'; '.join(complaints)}")
    _tell_what_is_rounded(found, checkpoint)
    return found


def _misshapen(row: Weight, checkpoint: Checkpoint) -> Iterator[str]:
    """Yield the tensors of a row that have other sizes than it needs, with both."""
    wanted = row.matrix or row.shape
    stacked = row.experts is not None and not row.by_expert
    for source in row.sources:
        if source not in checkpoint:
            continue
        shape = checkpoint.shape(source)
        own = shape[1:] if stacked and shape[:1] == (row.experts,) else (row.parts, *shape) if row.parts else shape
        try:
            laid_out = tuple(row.layout(torch.empty(own, device="meta")).shape)
        except (RuntimeError, IndexError):
            laid_out = None
        if laid_out != wanted or (stacked and own == shape):
            yield f"{source} {list(shape)} (for {row.name} {list(wanted)})"


def _tell_what_is_rounded(found: Mapping[Key, Weight], checkpoint: Checkpoint) -> None:
    """Log which matrices of a checkpoint in few bits are whole there, though the model stores them in few bits."""
    packed = checkpoint.packed_readers
    rounded = (row for row in found.values() if row.store and row.value is None)
    stored = dict.fromkeys(source for row in rounded for source in row.sources)
    if packed and (whole := [source for source in stored if source not in packed]):
        _LOG.warning(
            "%s has these matrices whole, and here they are rounded: %s", checkpoint.directory, collapsed(whole)
        )


def collapsed(names: Sequence[str], limit: int = 6) -> str:
    """Format a readable list: names that differ only in the layer's number are merged, and the rest is counted."""
    layers: dict[str, list[str]] = {}
    for name in names:
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", name, count=1)
        layers.setdefault(pattern, []).append(name)
    shown = [ns[0] if len(ns) == 1 else f"{pattern} ({len(ns)} layers)" for pattern, ns in layers.items()]
    return ", ".join(shown[:limit]) + (f" and {len(shown) - limit} more" if len(shown) > limit else "")


class Sharded(NamedTuple):
    """The weights that share a tensor, its type, and what makes its pieces: one per device here, or one for all.

    Those of one `source`, unless it is None, are made together, and should be asked for one after the other.
    """

    keys: list[Key]
    element: str
    pieces: Callable[[], list[torch.Tensor]]
    source: Any = None


class _Tensor(NamedTuple):
    """How a tensor for the devices is made of one of the checkpoint. Weights of equal ones share it."""

    layout: Layout
    store: Store | None
    split: Split | None
    word: int | None
    element: str
    shape: tuple[int, ...]  # on a device
    by_outputs: bool  # whether each output of it follows from one of the matrix
    experts: int | None  # how many a device has; the rest of this is about one of them
    whole_experts: bool  # whether each device has others

    def numbers(self, devices: range) -> range:
        """The numbers of the experts that these devices have."""
        experts = self.experts or 0
        return range(devices.start * experts, devices.stop * experts) if self.whole_experts else range(experts)

    def stacks(self, devices: int) -> list[torch.Tensor]:
        """Return room for the experts of each device, or once for all."""
        sizes, dtype = (self.experts or 0, *self.shape), to_torch(self.element)
        return [torch.zeros(sizes, dtype=dtype) for _ in range(devices if self.split or self.whole_experts else 1)]


class _Source:
    """A tensor of the checkpoint, or one for each expert, or what computes one; and what is made of it for the devices.

    Tensors that are stored in another form are made together when the first is taken, and kept until they are.
    """

    def __init__(self, tensors: Iterable[_Tensor], row: Weight, checkpoint: Checkpoint) -> None:
        self._tensors, self._row, self._checkpoint = [*tensors], row, checkpoint
        self._made: dict[_Tensor, list[torch.Tensor]] = {}
        self._lock = threading.Lock()

    def take(self, how: _Tensor, degree: int, here: range | None) -> list[torch.Tensor]:
        """Return the pieces of a tensor."""
        with self._lock:
            if how not in self._made:
                self._made.update(self._make(how, degree, here))
            return self._made.pop(how)

    def _make(self, how: _Tensor, degree: int, here: range | None) -> dict[_Tensor, list[torch.Tensor]]:
        def made(matrix: torch.Tensor | Packed | Unread) -> dict[_Tensor, list[torch.Tensor]]:
            return self._stored(matrix, degree, here) if how.store else {how: _whole(matrix, how, degree, here)}

        if how.experts is None:
            [(_, matrix)] = self._read(how.store is not None)
            return made(matrix)
        devices = range(degree) if here is None else here
        stacks = {each: each.stacks(len(devices)) for each in (self._tensors if how.store else [how])}
        for number, matrix in self._read(how.store is not None, how.numbers(devices)):
            for each, pieces in made(matrix).items():
                device, place = divmod(number, how.experts)
                own = stacks[each] if not how.whole_experts else [stacks[each][device - devices.start]]
                for stack, piece in zip(own, pieces, strict=True):
                    stack[place] = piece
        return stacks

    def _read(
        self, in_few_bits: bool, experts: range | None = None
    ) -> Iterator[tuple[int, torch.Tensor | Packed | Unread]]:
        """Yield the tensor with 0, or those of some experts with their numbers."""
        if self._row.value is not None:
            yield 0, self._row.value()
        elif self._row.parts:
            yield 0, torch.stack([self._checkpoint.read(source) for source in self._row.sources])
        elif experts is None or self._row.by_expert:
            for number, source in enumerate(self._row.sources):
                if experts is not None and number not in experts:
                    continue
                few = self._checkpoint.in_few_bits(source) if in_few_bits else None
                yield number, self._checkpoint.read(source) if few is None else few
        else:
            [source] = self._row.sources
            for number, matrix in enumerate(self._checkpoint.read(source)):
                if number in experts:
                    yield number, matrix

    def _stored(
        self, matrix: torch.Tensor | Packed | Unread, degree: int, here: range | None
    ) -> dict[_Tensor, list[torch.Tensor]]:
        found: dict[_Tensor, list[torch.Tensor]] = {}
        alike: dict[Any, list[_Tensor]] = {}
        for how in self._tensors:
            if how.by_outputs:
                split = how.split if how.split and how.split.axis == 0 else None
                alike.setdefault((how.layout, split), []).append(how)
            elif how.store:
                one = how.layout(matrix) if isinstance(matrix, torch.Tensor) else matrix.outputs(torch.arange(1))
                found[how] = how.split.cut(how.store(one), degree, here) if how.split else [how.store(one)]
        for (layout, _), tensors in alike.items():
            wanted = [Stored(t.store, t.split, t.shape, t.word, to_torch(t.element)) for t in tensors if t.store]
            found.update(zip(tensors, arrays_of(matrix, layout, wanted, degree, here), strict=True))
        return found


def _whole(tensor: Any, how: _Tensor, degree: int, here: range | None) -> list[torch.Tensor]:
    """Return the pieces of a tensor that is stored as it is, as views of the checkpoint's file if possible."""
    whole = how.layout(tensor)
    shares = how.split.cut(whole, degree, here) if how.split else [whole]
    return [panels.laid_out(share, how.word, to_torch(how.element)) for share in shares] if how.word else shares


def shards(
    resolved: Mapping[Key, Weight], checkpoint: Checkpoint, dtype: str, degree: int, here: range | None = None
) -> Iterator[Sharded]:
    """Iterate over the checkpoint's tensors for `degree` devices, or those that are `here`. Tensors are read on demand.

    Weights that are one tensor of the checkpoint, laid out and split alike, come once, so tied weights share memory.
    Those of one tensor follow each other, so that a matrix in few bits is read once for its values, scales and minima.
    """
    sources: dict[Any, dict[_Tensor, list[Key]]] = {}
    rows = {row.value or row.source: row for row in resolved.values()}
    for key, row in resolved.items():
        by_outputs = row.store is not None and not row.name.endswith(ORDER)
        experts, shape = (row.held(degree)[0], row.held(degree)[1:]) if row.experts else (None, row.held(degree))
        stored = row.layout, row.store, row.split, row.word, row.dtype or dtype
        how = _Tensor(*stored, shape, by_outputs, experts, row.whole_experts)
        sources.setdefault(row.value or row.source, {}).setdefault(how, []).append(key)
    for name, tensors in sources.items():
        source = _Source(tensors, rows[name], checkpoint)
        for how, keys in tensors.items():
            yield Sharded(keys, how.element, functools.partial(source.take, how, degree, here), name)
