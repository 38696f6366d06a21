"""Reads the rows of the table from a checkpoint: finds each weight by name, lays it out, and divides it."""

from __future__ import annotations

import functools
import logging
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from transformers_neuronx.errors import CheckpointError
from transformers_neuronx.pyhlo.dtypes import to_torch
from transformers_neuronx.weights import panels
from transformers_neuronx.weights.checkpoint import Checkpoint
from transformers_neuronx.weights.packed import Packed
from transformers_neuronx.weights.rows import Weight

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
    whole = (row.experts, *wanted) if row.experts and not row.by_expert else wanted
    for source in row.sources:
        if source not in checkpoint:
            continue
        shape = checkpoint.shape(source)
        try:
            laid_out = tuple(row.layout(torch.empty(shape, device="meta")).shape)
        except (RuntimeError, IndexError):
            laid_out = None
        if laid_out != whole:
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
    """The weights that share a tensor, its type, and what makes its pieces: one per device here, or one for all."""

    keys: list[Key]
    element: str
    pieces: Callable[[], list[torch.Tensor]]


class _Unpacked:
    """A checkpoint's matrices in few bits. Each is unpacked once, for all weights that are made of it."""

    def __init__(self, checkpoint: Checkpoint, uses: Mapping[str, int]) -> None:
        self._checkpoint, self._uses = checkpoint, uses  # how many weights are made of each tensor in few bits
        self._kept: dict[str, tuple[Packed, int]] = {}  # those that more weights will need, and how many
        self._lock = threading.Lock()  # who comes second takes what the first has unpacked

    def take(self, source: str) -> Packed | None:
        """Return the matrix, or None if it is whole in the checkpoint. The last weight that needs it lets it go."""
        with self._lock:
            packed, left = self._kept.pop(source, (None, self._uses[source]))
            packed = packed or self._checkpoint.packed(source)
            if packed and left > 1:
                self._kept[source] = packed, left - 1
            return packed


def shards(
    resolved: Mapping[Key, Weight], checkpoint: Checkpoint, dtype: str, degree: int, here: range | None = None
) -> Iterator[Sharded]:
    """Iterate over the checkpoint's tensors for `degree` devices, or those that are `here`. Tensors are read on demand.

    Weights that are one tensor of the checkpoint, laid out and split alike, come once, so tied weights share memory.
    Those of one tensor follow each other, so that a matrix in few bits is unpacked once for its values, scales and
    minima. Pieces are views of the checkpoint's file if possible.
    """
    groups: dict[Any, dict[Weight, list[Key]]] = {}  # by source
    for key, row in resolved.items():
        how = replace(row, name="", dtype=row.dtype or dtype, kinds=None, only=None, layers=None)
        groups.setdefault(row.value or row.source, {}).setdefault(how, []).append(key)
    uses = Counter(source for of_one in groups.values() for row in of_one if row.store for source in row.sources)
    unpacked = _Unpacked(checkpoint, uses)

    def pieces(row: Weight) -> list[torch.Tensor]:
        stacks: list[torch.Tensor] = []
        for number, whole in enumerate(_wholes(row, checkpoint, unpacked)):
            shares = row.split.cut(whole, degree, here) if row.split else [whole]
            if row.word:
                shares = [panels.laid_out(share, row.word, to_torch(row.dtype or dtype)) for share in shares]
            if row.experts is None:
                return shares
            stacks = stacks or [share.new_empty(row.experts, *share.shape) for share in shares]
            for stack, share in zip(stacks, shares, strict=True):
                stack[number] = share
        return stacks

    for of_one in groups.values():
        for row, keys in of_one.items():
            yield Sharded(keys, row.dtype or dtype, functools.partial(pieces, row))


def _wholes(row: Weight, checkpoint: Checkpoint, unpacked: _Unpacked) -> Iterator[torch.Tensor]:
    """Yield the whole tensor of a row, or that of each expert."""
    if row.value is not None:
        yield row.layout(row.value())
        return
    for source in row.sources:
        if row.store and (packed := unpacked.take(source)):
            yield row.store(packed.laid_out(row.layout))
            continue
        whole = row.layout(checkpoint.read(source))
        for each in whole if row.experts and not row.by_expert else [whole]:
            yield row.store(each) if row.store else each
