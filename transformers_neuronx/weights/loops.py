"""Loops over numbers of few bits that are compiled, if a compiler was there at the installation.

They take the time of many operations of torch, one after the other, over the same numbers. Their callers have the
operations as well, which say what a loop returns.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch


@functools.cache
def built() -> Any:
    """Return the library of loops, or None if it was not built."""
    try:
        return importlib.import_module("transformers_neuronx.weights._loops")
    except ImportError:
        return None


def bytes_of(tensor: torch.Tensor) -> Any:
    """Return the memory of a contiguous tensor as an array of bytes, which a loop may write to."""
    return tensor.view(torch.uint8).numpy()
