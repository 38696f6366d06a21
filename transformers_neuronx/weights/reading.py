"""Reads the rows of the table from a checkpoint: finds each weight by name, lays it out, and divides it."""

from __future__ import annotations

import functools
import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from transformers_neuronx.errors import CheckpointError
from transformers_neuronx.pyhlo.dtypes import to_torch
from transformers_neuronx.weights import panels
from transformers_neuronx.weights.checkpoint import Checkpoint
from transformers_neuronx.weights.layouts import Layout
from transformers_neuronx.weights.packed import Packed, Store
from transformers_neuronx.weights.rows import Weight
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
    missing, misshapen = [], []
    for key, row in expand(table, kinds):
        if row.value is not None:
            found[key] = row
            continue
        names = [name for full in row.source.split("|") for name in (full, full.removeprefix(prefix))]
        source = next((name for name in names if name in checkpoint), None)
        if source is None:
            missing.append(row.source)
            continue
        found[key] = replace(row, source=source)
        shape = checkpoint.shape(source)
        try:
            laid_out = tuple(row.layout(torch.empty(shape, device="meta")).shape)
        except (RuntimeError, IndexError):
            laid_out = None
        if laid_out != (wanted := row.matrix or row.shape):
            misshapen.append(f"{source} {list(shape)} (for {row.name} {list(wanted)})")
    used = {row.source for row in found.values() if row.value is None}
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


def _tell_what_is_rounded(found: Mapping[Key, Weight], checkpoint: Checkpoint) -> None:
    """Log which matrices of a checkpoint in few bits are whole there, though the model stores them in few bits."""
    packed = checkpoint.packed_readers
    stored = dict.fromkeys(row.source for row in found.values() if row.store and row.value is None)
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
    groups: dict[Any, dict[tuple[Any, ...], list[Key]]] = {}  # by source
    for key, row in resolved.items():
        source = row.value or row.source
        identity = (source, row.layout, row.store, row.split, row.word, row.dtype or dtype)
        groups.setdefault(source, {}).setdefault(identity, []).append(key)
    uses = {source: sum(store is not None for _, _, store, *_ in of_one) for source, of_one in groups.items()}
    unpacked = _Unpacked(checkpoint, uses)

    def pieces(
        source: Any, layout: Layout, store: Store | None, split: Split | None, word: int | None, element: str
    ) -> list[torch.Tensor]:
        if store and not callable(source) and (stored := unpacked.take(source)):
            whole = store(stored.laid_out(layout))
        else:
            whole = layout(source() if callable(source) else checkpoint.read(source))
            whole = store(whole) if store else whole
        shares = split.cut(whole, degree, here) if split else [whole]
        return [panels.laid_out(share, word, to_torch(element)) for share in shares] if word else shares

    for of_one in groups.values():
        for how, keys in of_one.items():
            yield Sharded(keys, how[-1], functools.partial(pieces, *how))
