"""Arguments of calls: for each row, its real tokens and the position of the first.

Padding on either side, `start_ids`, `cache_ids` and attention masks are resolved here. Input that the model cannot
serve is refused here, before anything runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from transformers_neuronx.engine.images import Pictured
from transformers_neuronx.errors import InputError

Integers = torch.Tensor | np.ndarray[Any, Any] | Sequence[Any]


@dataclass(frozen=True)
class Rows:
    """Rows of a call: `tokens[i]` s32[·] go to positions `start[i]`, `start[i] + 1`, … of slot `slots[i]`.

    `real` pred[batch, columns] marks the caller's columns that hold them; the others are padding. `prompts` are those
    of rows with images, None for others; nothing if no row has any.
    """

    tokens: list[np.ndarray[Any, Any]]
    start: np.ndarray[Any, Any]
    real: np.ndarray[Any, Any]
    slots: np.ndarray[Any, Any]
    prompts: Sequence[Pictured | None] = field(default=(), kw_only=True)

    def pictured(self, row: int) -> Pictured | None:
        """Return the images of a row and where they stand, if it has any."""
        return self.prompts[row] if self.prompts else None

    @property
    def end(self) -> np.ndarray[Any, Any]:
        """The position after each row's last token."""
        end: np.ndarray[Any, Any] = self.start + np.array([len(row) for row in self.tokens])
        return end


def integers(name: str, value: Integers, ndim: int) -> np.ndarray[Any, Any]:
    """Return `value` as an int64 array. Raises InputError unless it holds integers in `ndim` dimensions."""
    array: np.ndarray[Any, Any] = np.asarray(value.cpu() if isinstance(value, torch.Tensor) else value)
    if array.ndim != ndim or (array.size and array.dtype.kind not in "iub"):
        raise InputError(f"{name} must be integers in {ndim} dimensions, got {array.dtype}{list(array.shape)}")
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
    """Read the rows of a call.

    input_ids [batch, n] are the tokens of the last n columns. Their positions come from attention_mask
    [batch, columns so far], with zeros for padding anywhere; or from cache_ids [n] or [batch, n], the columns, and
    start_ids [batch], the number of padding columns on the left. Raises InputError for input that the model cannot
    serve. Sequences are checked against `longest` only if it is given.
    """
    ids = integers("input_ids", input_ids, 2)
    batch, n = ids.shape
    if ids.size == 0:
        raise InputError(f"the prompt is empty: input_ids needs at least one row and one token, got {list(ids.shape)}")
    if attention_mask is None:
        positions = _columns(cache_ids, batch, n) - _padding(start_ids, batch)
        real = positions >= 0
    elif start_ids is None and cache_ids is None:
        mask = _mask(attention_mask, batch, n)
        positions, real = mask.cumsum(1)[:, -n:] - 1, mask[:, -n:]
    else:
        raise InputError("attention_mask gives positions, and so do start_ids and cache_ids: pass one or the other")
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
    """Read the rows of a call that names their slots.

    input_ids and cache_ids [batch, n] are padded on the right. start_ids [batch] or [batch, 1] are the slots; None is
    the first ones in order. A row ends where its cache_ids, the positions of tokens, stop counting up.
    """
    if cache_ids is None:
        raise InputError("start_ids names slots and needs cache_ids [batch, n], the positions of the tokens: pass both")
    ids, positions = integers("input_ids", input_ids, 2), integers("cache_ids", cache_ids, 2)
    named = np.arange(len(ids)) if start_ids is None else start_ids
    where = integers("start_ids", named, 2 if np.ndim(named) == 2 else 1).reshape(-1)
    if positions.shape != ids.shape or where.shape != ids.shape[:1] or not ids.size:
        raise InputError(
            "input_ids, cache_ids and start_ids must have shapes [batch, n], [batch, n] and [batch], got "
            f"{list(ids.shape)}, {list(positions.shape)} and {list(where.shape)}"
        )
    if (where < 0).any() or (where >= slots).any() or len(set(where.tolist())) != len(where):
        raise InputError(f"start_ids must be distinct, at least 0 and below batch_size={slots}, got {where.tolist()}")
    real = np.cumprod(positions == positions[:, :1] + np.arange(ids.shape[1]), axis=1).astype(bool)
    if (positions[:, 0] < 0).any() or (positions[~real] > 0).any():
        wanted = "positions that count up, followed by padding of 0 or -1"
        raise InputError(f"cache_ids must be {wanted}, got {positions.tolist()}")
    return _rows(ids, real, positions[:, 0], where, vocab_size, longest)


def read_numbers(sources: Any, sizes: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Return sources of numbers as f32[batch, *sizes]. Raises InputError for other sizes, and for NaN and infinity."""
    values = sources.detach().cpu().float() if isinstance(sources, torch.Tensor) else sources
    array: np.ndarray[Any, Any] = np.asarray(values)
    if array.dtype.kind not in "fiu" or array.ndim != 1 + len(sizes) or array.shape[1:] != sizes or not len(array):
        wanted = f"numbers [batch, {', '.join(map(str, sizes))}], with at least one row"
        raise InputError(f"the sources of this model are {wanted}, got {array.dtype}{list(array.shape)}")
    numbers: np.ndarray[Any, Any] = np.ascontiguousarray(array, np.float32)
    if not np.isfinite(numbers).all():
        raise InputError("sources must be finite numbers, got NaN or infinity")
    return numbers


def _check_not_empty(real: np.ndarray[Any, Any]) -> None:
    empty = np.flatnonzero(~real.any(1))
    if empty.size:
        raise InputError(f"the prompt is empty: row {empty[0]} has only padding")


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
        raise InputError(f"input_ids must be ids from 0 to {vocab_size - 1}, got {ids[row, column]} in row {row}")
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
            f"cache_ids must be consecutive columns for {n} tokens, of shape [{n}] or [{batch}, {n}], "
            f"got {columns.tolist()}"
        )
    return np.broadcast_to(columns, (batch, n))


def _padding(start_ids: Integers | None, batch: int) -> np.ndarray[Any, Any]:
    if start_ids is None:
        return np.zeros((batch, 1), np.int64)
    padding = integers("start_ids", start_ids, 1)
    if padding.shape != (batch,) or (padding < 0).any():
        raise InputError(f"start_ids must be the padding columns of each of {batch} rows, got {padding.tolist()}")
    return padding[:, None]


def _mask(attention_mask: Integers, batch: int, n: int) -> np.ndarray[Any, Any]:
    mask = np.asarray(attention_mask.cpu() if isinstance(attention_mask, torch.Tensor) else attention_mask)
    mask = integers("attention_mask", mask != 0, 2)  # floats, too: Transformers accepts them
    if mask.shape[0] != batch or mask.shape[1] < n:
        raise InputError(f"attention_mask must be [{batch}, {n} or more], for all columns, got {list(mask.shape)}")
    real: np.ndarray[Any, Any] = mask.astype(bool)
    return real
