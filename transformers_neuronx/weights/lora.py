"""Rows of the weight table for low-rank adapters, and the content of one adapter in them.

A linear layer [out, in] that can have adapters has two more rows: `lora_a` [adapters * rank, in] and `lora_b`
[adapters * rank, out], with `rank` rows for each adapter. They are divided over devices as the matrix is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from transformers_neuronx.errors import CheckpointError
from transformers_neuronx.weights.adapters import Adapter
from transformers_neuronx.weights.layouts import as_is
from transformers_neuronx.weights.reading import Key, expand
from transformers_neuronx.weights.rows import Weight

DOWN, UP = "lora_a", "lora_b"


class AdapterLayout(NamedTuple):
    """The rows of adapters on the devices: so many `places` for them, of `rank` each."""

    places: int
    rank: int
    rows: Sequence[Weight]

    @staticmethod
    def of(table: Sequence[Weight], places: int, rank: int) -> AdapterLayout:
        """Return the layout of so many adapters of a rank for the linear layers of the table."""
        found = []
        for row in filter(_may_have_adapters, table):
            (outputs, inputs), layer = row.shape, row.name.removesuffix("weight")
            across = row.split and replace(row.split, axis=1)
            splits = (across, None) if row.reduces else (None, across)
            found += [
                replace(row, name=layer + name, shape=(places * rank, size), layout=as_is, split=split)
                for name, size, split in zip((DOWN, UP), (inputs, outputs), splits, strict=True)
            ]
        return AdapterLayout(places, rank, found)

    @staticmethod
    def has(row: Weight) -> bool:
        """Whether a row is of adapters."""
        return row.name.endswith((DOWN, UP))

    def of_layer(self, layer: int, kinds: Sequence[str]) -> list[Weight]:
        """Return the rows that a layer has, given the kind of each."""
        return [row for row in self.rows if layer in row.numbers(kinds)]

    @property
    def form(self) -> str:
        return f"adapters{self.places}_rank{self.rank}"


def _may_have_adapters(row: Weight) -> bool:
    return row.multiplies and row.layered and row.experts is None


def placed(
    adapter: Adapter, table: Sequence[Weight], kinds: Sequence[str], rank: int, prefix: str
) -> Mapping[Key, torch.Tensor]:
    """Return what an adapter has in the rows of adapters, for a table whose layers have these kinds.

    [rank, in] and [rank, out] each, for the layers that it changes; the scale is in the second. CheckpointError if it
    changes something else, does not fit, or has a higher rank.
    """
    adapter.want_products_alone()
    found: dict[Key, torch.Tensor] = {}
    used = set()
    for (layer, name), row in expand([*filter(_may_have_adapters, table)], kinds):
        names = [name for full in row.source.split("|") for name in (full, full.removeprefix(prefix))]
        source = next((name for name in names if name in adapter.changes), None)
        if source is None:
            continue
        used.add(source)
        change = adapter.changes[source]
        if len(change.a) > rank:
            raise CheckpointError(
                f"{adapter.directory}: the adapter of {source} has rank {len(change.a)}, and at most {rank} fits: "
                "raise max_lora_rank"
            )
        up = row.layout(change.b.T.float() if change.transposed else change.b.float()) * change.scale
        if (sizes := (up.shape[0], change.a.shape[1])) != row.shape:
            raise CheckpointError(
                f"{adapter.directory}: the adapter of {source} is for {list(sizes)}, not {list(row.shape)}"
            )
        stem = name.removesuffix("weight")
        missing = rank - len(change.a)
        found[layer, stem + DOWN] = torch.nn.functional.pad(change.a.float(), (0, 0, 0, missing))
        found[layer, stem + UP] = torch.nn.functional.pad(up.T, (0, 0, 0, missing))
    if unknown := sorted(adapter.changes.keys() - used):
        raise CheckpointError(
            f"{adapter.directory}: the adapter changes {unknown[0]!r}, which cannot differ by request: merge it, with "
            "from_pretrained(…, adapter=…)"
        )
    return found
