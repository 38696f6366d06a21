"""Explain why an operation cannot be lowered, and what to use instead."""

from __future__ import annotations

from typing import Any

import torch

from transformers_neuronx.trace.aten.table import TABLE

OUTSIDE = "do this outside the traced function"


def refused(operation: Any, value: Any) -> tuple[str, str] | None:
    """Return why an operation with this result cannot be lowered, and what to do; None if it can."""
    if any(not isinstance(size, int) for each in _tensors(value) for size in each.shape):
        return (
            f"{operation} returns a size that depends on tensor values, but a program has fixed sizes",
            f"Use torch.where, which keeps all elements, or {OUTSIDE}",
        )
    if operation in TABLE:
        return None
    tags = getattr(operation, "tags", ())
    if torch.Tag.data_dependent_output in tags:
        return (
            f"{operation} reads a number from a tensor, as item(), int() and tolist() do, but a program is compiled "
            "before the numbers are known",
            f"Keep it a tensor, or {OUTSIDE}",
        )
    if torch.Tag.nondeterministic_seeded in tags:
        return (
            f"{operation} draws random numbers, but a program returns the same outputs for the same inputs",
            "Draw them outside, and pass them to the function as an input",
        )
    if "batch_norm" in str(operation):
        return f"{operation} collects statistics in training mode", "Call the model's eval() first"
    return (
        f"{operation} has no lowering to HLO",
        f"Use other operations, {OUTSIDE}, or add a lowering to transformers_neuronx/trace/aten",
    )


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, list | tuple):
        return [each for part in value for each in _tensors(part)]
    return [value] if isinstance(value, torch.Tensor) else []
