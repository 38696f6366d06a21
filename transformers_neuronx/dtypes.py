"""The short names of element types, and PyTorch's for the same."""

from __future__ import annotations

from typing import Any

import torch

from transformers_neuronx.errors import ConfigError

_TORCH = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "s8": torch.int8,
    "f8e4m3fn": torch.float8_e4m3fn,
}


def to_torch_dtype(dtype: str) -> torch.dtype:
    """`torch.bfloat16` for "bf16"."""
    if dtype not in _TORCH:
        raise ConfigError(f"dtype wants one of {', '.join(_TORCH)}, got {dtype!r}")
    return _TORCH[dtype]


def to_amp(dtype: torch.dtype) -> str:
    """What `amp` is called for a checkpoint of this type: "bf16" for `torch.bfloat16`."""
    names = {_TORCH[name]: name for name in ("f32", "f16", "bf16")}
    if dtype not in names:
        raise ConfigError(f"dtype wants one of {', '.join(map(str, names))}, got {dtype}")
    return names[dtype]


def to_pyhlo_type(scribe: Any, dtype: str) -> Any:
    """`scribe.bf16` for "bfloat16"."""
    return getattr(scribe, to_amp(getattr(torch, dtype)))
