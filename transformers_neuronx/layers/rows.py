"""Rows of integers by name: all that a step is told of its rows is one array, for one transfer.

A row is a numpy type of 32-bit fields. The host fills an array of rows by the names of fields, and a program reads the
same fields from s32[rows, columns].
"""

from __future__ import annotations

from typing import Any

import numpy as np

from transformers_neuronx import hlo
from transformers_neuronx.pyhlo import Tensor, dtype_named

Array = np.ndarray[Any, Any]
Row = np.dtype[Any]


def row_of(**sizes: int | None) -> Row:
    """Return the type of a row with these fields: a number each, or if a size is given, so many."""
    return np.dtype([(name, np.int32) if size is None else (name, np.int32, (size,)) for name, size in sizes.items()])


def columns(row: Row) -> int:
    """Return the number of columns of a row."""
    return row.itemsize // 4


def words(rows: Array) -> Array:
    """Return rows [b] as the program gets them: s32[b, columns]."""
    return np.ascontiguousarray(rows).view(np.int32).reshape(len(rows), columns(rows.dtype))


def declare_rows(parameters: hlo.Parameters, row: Row, count: int, name: str) -> Tensor:
    """Declare `count` rows as a parameter, s32[count, columns]."""
    return parameters.add(dtype_named("s32")[count, columns(row)], name)


def joined(*rows: Array) -> Array:
    """Return several arrays of rows as one for a single transfer, s32[·]."""
    return np.concatenate([words(each).reshape(-1) for each in rows])


def declare_joined(parameters: hlo.Parameters, name: str, *rows: tuple[Row, int]) -> list[Tensor]:
    """Declare several arrays of rows, each with its type and count, as one parameter. -> s32[count, columns] each"""
    sizes = [count * columns(row) for row, count in rows]
    whole, first = parameters.add(dtype_named("s32")[[sum(sizes)]], name), 0
    arrays = []
    for (row, count), size in zip(rows, sizes, strict=True):
        arrays.append(hlo.reshape(hlo.slice(whole, 0, first, first + size), count, columns(row)))
        first += size
    return arrays


def field(packed: Tensor, row: Row, name: str) -> Tensor:
    """Return a field of each row: s32[b], or s32[b, size] if it has a size. packed s32[b, columns]"""
    assert row.fields is not None
    kind, offset = row.fields[name][:2]
    first = offset // 4
    found = hlo.slice(packed, 1, first, first + kind.itemsize // 4)
    return found if kind.shape else hlo.reshape(found, packed.sizes[0])
