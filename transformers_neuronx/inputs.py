"""The door: what a caller passes becomes, row by row, real tokens and the position of the first of them.

Padding on either side, `start_ids`, `cache_ids` and attention masks end here. What the model cannot serve is refused
here, before anything runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from transformers_neuronx.errors import InputError

Integers = torch.Tensor | np.ndarray[Any, Any] | Sequence[Any]


@dataclass(frozen=True)
class Rows:
    """`tokens[i]` s32[·] go to positions `start[i]`, `start[i] + 1`, … of the sequence in slot `slots[i]`.

    `real` pred[batch, columns] is where the caller has them.
    """

    tokens: list[np.ndarray[Any, Any]]
    start: np.ndarray[Any, Any]
    real: np.ndarray[Any, Any]
    slots: np.ndarray[Any, Any]

    @property
    def end(self) -> np.ndarray[Any, Any]:
        """The position after each row's last token."""
        end: np.ndarray[Any, Any] = self.start + np.array([len(row) for row in self.tokens])
        return end


def integers(name: str, value: Integers, ndim: int) -> np.ndarray[Any, Any]:
    """`value` as an int64 array of `ndim` dimensions."""
    array: np.ndarray[Any, Any] = np.asarray(value.cpu() if isinstance(value, torch.Tensor) else value)
    if array.ndim != ndim or (array.size and array.dtype.kind not in "iub"):
        raise InputError(f"{name} wants integers in {ndim} dimensions, got {array.dtype}{list(array.shape)}")
    widened: np.ndarray[Any, Any] = array.astype(np.int64)
    return widened


def read_rows(
    input_ids: Integers,
    *,
    vocab_size: int,
    longest: int | None,
    cache_ids: Integers | None = None,
    start_ids: Integers | None = None,
    attention_mask: Integers | None = None,
) -> Rows:
    """The rows of a call.

    input_ids [batch, n] are the tokens of the last n columns. Where those stand is said by attention_mask
    [batch, columns], over all columns so far, with zeros for padding wherever it is; or by cache_ids [n] or
    [batch, n], the columns, and start_ids [batch], how many of them are padding on the left. Raises InputError for
    anything the model cannot serve; of how many tokens there are only if the `longest` sequence is given.
    """
    ids = integers("input_ids", input_ids, 2)
    batch, n = ids.shape
    if ids.size == 0:
        raise InputError(f"the prompt is empty: input_ids wants at least one row and one token, got {list(ids.shape)}")
    if attention_mask is None:
        positions = _columns(cache_ids, batch, n) - _padding(start_ids, batch)
        real = positions >= 0
    elif start_ids is None and cache_ids is None:
        mask = _mask(attention_mask, batch, n)
        positions, real = mask.cumsum(1)[:, -n:] - 1, mask[:, -n:]
    else:
        raise InputError("attention_mask says where tokens stand, and so do start_ids and cache_ids: pass either")
    if cache_ids is None:
        _check_not_empty(real)
    start = np.maximum(positions[np.arange(batch), real.argmax(1)], 0)
    return _rows(ids, real, start, np.arange(batch), vocab_size, longest)


def read_slots(
    input_ids: Integers,
    cache_ids: Integers | None,
    start_ids: Integers | None,
    *,
    vocab_size: int,
    longest: int,
    slots: int,
) -> Rows:
    """The rows of a call that names their slots: input_ids and cache_ids [batch, n], padded on the right, start_ids
    [batch] or [batch, 1], or None for the first slots in order. A row's tokens are those whose cache_ids, their
    positions, go on counting from its first.
    """
    if cache_ids is None:
        raise InputError("start_ids names slots, and wants cache_ids [batch, n], the positions, beside it")
    ids, positions = integers("input_ids", input_ids, 2), integers("cache_ids", cache_ids, 2)
    named = np.arange(len(ids)) if start_ids is None else start_ids
    where = integers("start_ids", named, 2 if np.ndim(named) == 2 else 1).reshape(-1)
    if positions.shape != ids.shape or where.shape != ids.shape[:1] or not ids.size:
        raise InputError(
            "input_ids, cache_ids and start_ids want shapes [batch, n], [batch, n] and [batch], got "
            f"{list(ids.shape)}, {list(positions.shape)} and {list(where.shape)}"
        )
    if (where < 0).any() or (where >= slots).any() or len(set(where.tolist())) != len(where):
        raise InputError(f"start_ids wants slots below batch_size={slots}, each once, got {where.tolist()}")
    real = np.cumprod(positions == positions[:, :1] + np.arange(ids.shape[1]), axis=1).astype(bool)
    if (positions[:, 0] < 0).any() or (positions[~real] > 0).any():
        wanted = "positions that count up, and then padding of 0 or -1"
        raise InputError(f"cache_ids wants {wanted}, got {positions.tolist()}")
    return _rows(ids, real, positions[:, 0], where, vocab_size, longest)


def _check_not_empty(real: np.ndarray[Any, Any]) -> None:
    empty = np.flatnonzero(~real.any(1))
    if empty.size:
        raise InputError(f"the prompt is empty: row {empty[0]} is padding only")


def _rows(
    ids: np.ndarray[Any, Any],
    real: np.ndarray[Any, Any],
    start: np.ndarray[Any, Any],
    slots: np.ndarray[Any, Any],
    vocab_size: int,
    longest: int | None,
) -> Rows:
    outside = real & ((ids < 0) | (ids >= vocab_size))
    if outside.any():
        row, column = np.argwhere(outside)[0]
        raise InputError(f"input_ids wants ids from 0 to {vocab_size - 1}, got {ids[row, column]} in row {row}")
    rows = Rows([row[mask] for row, mask in zip(ids, real, strict=True)], start, real, slots)
    if longest is not None and rows.end.max() > longest:
        raise InputError(f"n_positions={longest} is the longest sequence this model takes, got {rows.end.max()} tokens")
    return rows


def _columns(cache_ids: Integers | None, batch: int, n: int) -> np.ndarray[Any, Any]:
    if cache_ids is None:
        return np.arange(n)[None].repeat(batch, 0)
    columns = np.asarray(cache_ids)
    columns = integers("cache_ids", cache_ids, columns.ndim if columns.ndim in (1, 2) else 1)
    if columns.shape not in ((n,), (batch, n)) or (columns < 0).any() or (np.diff(columns) != 1).any():
        raise InputError(
            f"cache_ids wants consecutive columns for {n} tokens, of shape [{n}] or [{batch}, {n}], "
            f"got {columns.tolist()}"
        )
    return np.broadcast_to(columns, (batch, n))


def _padding(start_ids: Integers | None, batch: int) -> np.ndarray[Any, Any]:
    if start_ids is None:
        return np.zeros((batch, 1), np.int64)
    padding = integers("start_ids", start_ids, 1)
    if padding.shape != (batch,) or (padding < 0).any():
        raise InputError(f"start_ids wants a number of columns for each of {batch} rows, got {padding.tolist()}")
    return padding[:, None]


def _mask(attention_mask: Integers, batch: int, n: int) -> np.ndarray[Any, Any]:
    mask = np.asarray(attention_mask.cpu() if isinstance(attention_mask, torch.Tensor) else attention_mask)
    mask = integers("attention_mask", mask != 0, 2)  # of floats, too, as Transformers takes them
    if mask.shape[0] != batch or mask.shape[1] < n:
        raise InputError(f"attention_mask wants [{batch}, {n} or more], over all columns, got {list(mask.shape)}")
    real: np.ndarray[Any, Any] = mask.astype(bool)
    return real
