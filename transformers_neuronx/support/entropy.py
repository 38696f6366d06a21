"""Random numbers for draws without a seed. Processes that run one model together must draw the same."""

from __future__ import annotations

import secrets

import numpy as np

_shared: int | None = None
_drawn = 0


def share(entropy: int) -> None:
    """Draw from this entropy from now on. All processes of a world do this, and make the same draws after it."""
    global _shared, _drawn
    _shared, _drawn = entropy, 0


def new() -> int:
    """Return new entropy, which differs in every call and process."""
    return secrets.randbits(128)


def seed() -> np.random.SeedSequence:
    """Return the seed of a draw that was given none."""
    global _drawn
    if _shared is None:
        return np.random.SeedSequence()
    _drawn += 1
    return np.random.SeedSequence(_shared, spawn_key=(_drawn,))
