"""Lookup tables of ids and positions."""

from __future__ import annotations

from transformers_neuronx import hlo
from transformers_neuronx.layers.storage import numbers
from transformers_neuronx.pyhlo import Tensor
from transformers_neuronx.weights.parameters import Parameter


def lookup(table: Parameter, indices: Tensor) -> Tensor:
    """Look up rows of a table that every device holds whole. table [v, h], indices s32[b, n] -> [b, n, h]"""
    # XLA:CPU looks up f32 only. Without the barrier it would widen the whole table before a loop.
    all_parts = [table.tensor, table.scale, table.minimum, table.scale_unit, table.minimum_unit]
    stored = [each for each in all_parts if each is not None]
    indices, *stored = hlo.optimization_barrier(indices, *stored)
    found = iter([_rows(each, indices) for each in stored])
    rows, scale, *others = [None if each is None else next(found) for each in all_parts]
    assert rows is not None
    rows = hlo.slice(rows, -1, 0, table.sizes[1])
    if scale is None:
        return rows
    assert table.row.matrix is not None
    return numbers(rows, scale, table.dtype, *others, inputs=table.row.matrix[1], codes=table.row.codes)


def _rows(table: Tensor, indices: Tensor) -> Tensor:
    """Look up rows of a table [v, ...], or of a table in panels. -> [b, n, ...]"""
    if len(table.sizes) != 4:
        return hlo.take(table, indices)
    ids, together = hlo.reshape(indices, *indices.sizes, 1), table.sizes[2]
    place = hlo.concatenate([hlo.divide(ids, together), hlo.remainder(ids, together)], -1)
    return hlo.reshape(hlo.gather_rows(table, place, (0, 2)), *indices.sizes, -1)


def embedding(table: Parameter, ids: Tensor) -> Tensor:
    """Look up rows of a table split by rows: each device looks up the rows that it holds, and the results are summed.

    The head can share a table with this split. table [v / degree, h], ids s32[b, n] -> [b, n, h]
    """
    if table.degree == 1:
        return lookup(table, ids)
    share = table.sizes[0]
    local = ids - hlo.convert(hlo.replica_id(), "s32") * share
    here = hlo.logical_and(local >= 0, local < share)
    found = lookup(table, hlo.clamp(0, local, share - 1))
    found = hlo.select(hlo.reshape(here, *ids.sizes, 1), found, 0.0)
    return hlo.all_reduce(found, table.degree)
