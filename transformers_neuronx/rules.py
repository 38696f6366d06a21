"""How tokens are chosen: what a caller asks for, checked, and as programs have it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import numpy as np

from transformers_neuronx.errors import InputError

Array = np.ndarray[Any, Any]
Number = float | Sequence[float]


@dataclass(frozen=True)
class Rules:
    """How tokens are chosen, for all rows alike or with a value for each.

    `top_k` likeliest tokens (1 is greedy, 0 all), of those the fewest that reach the probability `top_p`, and of those
    the ones with `min_p` of the likeliest's. `repetition_penalty` divides the logits of tokens already there.

    A row's draws follow from its seed, its stream, the position and the logits, and from nothing else. With a `seed`
    for each row, a row draws the same in every slot, batch and company. One `seed` for all gives each row a stream of
    its own, by its place in the call: the first row draws what it draws alone. None draws anew in every call.
    """

    top_k: int | Sequence[int] = 50
    top_p: Number = 1.0
    temperature: Number = 1.0
    min_p: Number = 0.0
    repetition_penalty: Number = 1.0
    seed: int | Sequence[int] | None = None
    _seeds: Array = field(init=False, repr=False, compare=False)  # u32[] or [rows]

    def __post_init__(self) -> None:
        checks: list[tuple[str, str, Callable[[Array], Any]]] = [
            ("top_k", "at least 1, or 0 for all tokens", lambda x: (x >= 0) & (x == np.floor(x))),
            ("top_p", "above 0 and at most 1", lambda x: (x > 0) & (x <= 1)),
            ("temperature", "above 0 (greedy choice is top_k=1)", lambda x: (x > 0) & np.isfinite(x)),
            ("min_p", "from 0 to 1", lambda x: (x >= 0) & (x <= 1)),
            ("repetition_penalty", "above 0", lambda x: (x > 0) & np.isfinite(x)),
        ]
        for name, wanted, holds in checks:
            value = np.asarray(getattr(self, name))
            if value.dtype.kind not in "iuf" or value.ndim > 1 or not holds(value).all():
                raise InputError(f"{name} must be {wanted}, got {getattr(self, name)}")
        object.__setattr__(self, "_seeds", _hashed(self.seed))

    @property
    def penalizes(self) -> bool:
        """Whether the choice looks at the tokens that are already there."""
        return bool((np.asarray(self.repetition_penalty) != 1).any())

    def packed(self, rows: int, slots: Array | None = None) -> Array:
        """The columns of `layers.sampling.Policy`, as bits: of `rows`, or, where the values are for so many slots, of
        rows in these `slots`. s32[rows or len(slots), POLICY_COLUMNS]
        """
        chosen = np.arange(rows) if slots is None else slots
        columns = []
        for name in ("top_k", "temperature", "top_p", "min_p", "repetition_penalty"):
            value = np.asarray(getattr(self, name), np.int32 if name == "top_k" else np.float32)
            columns.append(_for_each(name, value, rows).view(np.int32)[chosen])
        columns.append(_for_each("seed", self._seeds, rows).view(np.int32)[chosen])
        stream = np.zeros(len(chosen)) if self._seeds.ndim else np.arange(len(chosen))
        return np.stack([*columns, stream.astype(np.int32)], 1)


def _hashed(seed: int | Sequence[int] | None) -> Array:
    """32 bits of each seed. u32[], or [rows] of a sequence"""
    seeds = [seed] if seed is None or isinstance(seed, Integral) else list(np.asarray(seed, object).ravel())
    if any(one is not None and not (isinstance(one, Integral) and int(one) >= 0) for one in seeds):
        raise InputError(f"seed must be a whole number of at least 0, or one for each row, got {seed}")
    hashed = np.array([np.random.SeedSequence(one).generate_state(1)[0] for one in seeds], np.uint32)
    return hashed.reshape(()) if seed is None or isinstance(seed, Integral) else hashed


def _for_each(name: str, value: Array, rows: int) -> Array:
    if value.ndim and len(value) != rows:
        raise InputError(f"{name} must be one value, or one for each of {rows} rows, got {len(value)}")
    return np.ascontiguousarray(np.broadcast_to(value, rows))
