"""Short names of element types, at the original's import path."""

from __future__ import annotations

from typing import Any

import torch

from transformers_neuronx.config import AMP
from transformers_neuronx.errors import ConfigError
from transformers_neuronx.pyhlo.dtypes import from_torch, to_torch


def to_torch_dtype(dtype: str) -> torch.dtype:
    """Return torch's type for the name of an element type: `torch.bfloat16` for "bf16"."""
    return to_torch(dtype)


def to_amp(dtype: torch.dtype) -> str:
    """Return the `amp` for a checkpoint of this type: "bf16" for `torch.bfloat16`."""
    name = from_torch(dtype).name
    if name not in AMP:
        raise ConfigError(f"dtype must be one of {', '.join(str(to_torch_dtype(name)) for name in AMP)}, got {dtype}")
    return name


def to_pyhlo_type(scribe: Any, dtype: str) -> Any:
    """Return the scribe's element type: `scribe.bf16` for "bfloat16"."""
    return getattr(scribe, to_amp(getattr(torch, dtype)))
