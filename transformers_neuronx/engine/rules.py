"""Rules of sampling: the values of a caller, checked, and in the form that programs take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import numpy as np

from transformers_neuronx.errors import InputError
from transformers_neuronx.support import entropy

Array = np.ndarray[Any, Any]
ALL = 2**31 - 1  # tokens, at most
# Bounds in which temperatures and penalties have their effect in full: one token is left, or all are alike. Logits that
# both were applied to are still finite in f32.
LEAST, MOST = 1e-15, 1e15
Number = float | Sequence[float]


@dataclass(frozen=True)
class Rules:
    """How tokens are sampled. Each field is one value for all rows, or a sequence with one value per row.

    They apply in this order, as in Transformers:

    - `repetition_penalty`: above 0. Divides positive logits of tokens that the row already has, and multiplies
      negative ones. Default 1.0, no penalty.
    - `temperature`: above 0. Divides all logits. Default 1.0.
    - `top_k`: keep this many of the most likely tokens, and ties with the last. 1 is greedy, 0 keeps all. Default 50.
    - `top_p`: in (0, 1]. Of those, keep the fewest whose probabilities add up to this. Default 1.0, all.
    - `min_p`: in [0, 1]. Of those, keep tokens with at least this share of the highest probability. Default 0.0, all.
    - `seed`: at least 0, for the random draw. None, the default, draws differently in every call.

    A draw depends on the row's seed, its stream, the position and the logits, and on nothing else. With one `seed` per
    row, a row draws the same in any slot and any batch. One `seed` for all rows gives each row its own stream, by its
    index in the call: the first row draws the same as it would alone.

    Raises InputError for a value out of range.
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
            ("top_k", "a whole number of at least 1, or 0 for all tokens", lambda x: (x >= 0) & (x == np.floor(x))),
            ("top_p", "in (0, 1]", lambda x: (x > 0) & (x <= 1)),
            ("temperature", "above 0 (for greedy decoding use top_k=1)", lambda x: (x > 0) & np.isfinite(x)),
            ("min_p", "in [0, 1]", lambda x: (x >= 0) & (x <= 1)),
            ("repetition_penalty", "above 0", lambda x: (x > 0) & np.isfinite(x)),
        ]
        for name, wanted, holds in checks:
            value = np.asarray(getattr(self, name))
            if value.dtype.kind not in "iuf" or value.ndim > 1 or not holds(value).all():
                raise InputError(f"{name} must be {wanted}, got {getattr(self, name)}")
        object.__setattr__(self, "_seeds", _hashed(self.seed))

    @property
    def penalizes(self) -> bool:
        """Whether sampling depends on the tokens that a row already has."""
        return bool((np.asarray(self.repetition_penalty) != 1).any())

    def check(self, rows: int) -> None:
        """Raise InputError where there is neither one value nor one for each of `rows` rows."""
        self._checked(rows)

    def _checked(self, rows: int) -> list[Array]:
        """Return the columns, of 32 bits, each one value or one for each of `rows` rows."""
        columns = {"top_k": np.minimum(self.top_k, ALL).astype(np.int32)}
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            least = 0.0 if name == "min_p" else LEAST
            columns[name] = np.clip(getattr(self, name), least, MOST).astype(np.float32)
        columns["seed"] = self._seeds
        for name, value in columns.items():
            if value.ndim and len(value) != rows:
                raise InputError(f"{name} must be one value, or one for each of {rows} rows, got {len(value)} values")
        return list(columns.values())

    def packed(self, rows: int, slots: Array | None = None) -> Array:
        """Return the columns of `layers.sampling.Policy` as bits, s32[rows, POLICY_COLUMNS].

        With `slots`, `rows` is the number of slots, and only these are returned: s32[len(slots), POLICY_COLUMNS].
        """
        chosen = np.arange(rows) if slots is None else slots
        columns = [np.ascontiguousarray(np.broadcast_to(x, rows)).view(np.int32)[chosen] for x in self._checked(rows)]
        stream = np.zeros(len(chosen)) if self._seeds.ndim else np.arange(len(chosen))
        return np.stack([*columns, stream.astype(np.int32)], 1)


def _hashed(seed: int | Sequence[int] | None) -> Array:
    """Hash each seed to 32 bits: u32[], or u32[rows] for a sequence."""
    seeds = [seed] if seed is None or isinstance(seed, Integral) else list(np.asarray(seed, object).ravel())
    if any(one is not None and not (isinstance(one, Integral) and int(one) >= 0) for one in seeds):
        raise InputError(f"seed must be a whole number of at least 0, or one per row, got {seed}")
    sequences = [entropy.seed() if one is None else np.random.SeedSequence(one) for one in seeds]
    hashed = np.array([one.generate_state(1)[0] for one in sequences], np.uint32)
    return hashed.reshape(()) if seed is None or isinstance(seed, Integral) else hashed


def penalty_of(policy: Array) -> float:
    """Return the repetition penalty of a policy, s32[POLICY_COLUMNS]."""
    return float(policy[4:5].view(np.float32)[0])


GREEDY = Rules(1, seed=0).packed(1)[0]  # the policy of a row that nobody reads
