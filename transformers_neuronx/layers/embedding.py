"""Tables that ids and positions are looked up in."""

from __future__ import annotations

from transformers_neuronx import hlo
from transformers_neuronx.layers.storage import numbers
from transformers_neuronx.pyhlo import Tensor
from transformers_neuronx.weights import Parameter


def lookup(table: Parameter, indices: Tensor) -> Tensor:
    """Rows of a table that every device has whole. table [v, h], indices s32[b, n] -> [b, n, h]"""
    # XLA:CPU looks up f32 only. In a loop it would widen the whole table beforehand, were it not for the barrier.
    stored = [table.tensor] if table.scale is None else [table.tensor, table.scale]
    indices, *stored = hlo.optimization_barrier(indices, *stored)
    rows, *scale = [hlo.take(each, indices) for each in stored]
    return numbers(rows, scale[0], table.dtype) if scale else rows


def embedding(table: Parameter, ids: Tensor) -> Tensor:
    """Rows of a table whose rows are split over the devices: each looks up those it has, and they are summed.

    Split so, a table can be the very weight of the head. table [v / degree, h], ids s32[b, n] -> [b, n, h]
    """
    if table.degree == 1:
        return lookup(table, ids)
    share = table.tensor.sizes[0]
    local = ids - hlo.convert(hlo.replica_id(), "s32") * share
    here = hlo.logical_and(local >= 0, local < share)
    found = lookup(table, hlo.clamp(0, local, share - 1))
    found = hlo.select(hlo.reshape(here, *ids.sizes, 1), found, 0.0)
    return hlo.all_reduce(found, table.degree)
