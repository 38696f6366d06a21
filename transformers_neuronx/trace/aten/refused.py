"""Operations that are not lowered: why, and what to do instead, for people."""

from __future__ import annotations

from typing import Any

import torch

from transformers_neuronx.trace.aten.table import TABLE

OUTSIDE = "do this before or after what is traced"


def refused(operation: Any, value: Any) -> tuple[str, str] | None:
    """Why an operation with such a result cannot be lowered, and what to do; None where it can."""
    if any(not isinstance(size, int) for each in _tensors(value) for size in each.shape):
        return (
            f"{operation} gives as many elements as values ask for, and a program has fixed sizes",
            f"Use torch.where, which keeps all elements, or {OUTSIDE}",
        )
    if operation in TABLE:
        return None
    tags = getattr(operation, "tags", ())
    if torch.Tag.data_dependent_output in tags:
        return (
            f"{operation} reads a number out of a tensor, as item(), int() and tolist() do, and a program is made "
            "before there are numbers",
            f"Leave it a tensor, or {OUTSIDE}",
        )
    if torch.Tag.nondeterministic_seeded in tags:
        return (
            f"{operation} draws numbers at random, and a program gives the same for the same inputs",
            "Draw them outside, and give them to the function as an input",
        )
    if "batch_norm" in str(operation):
        return f"{operation} gathers statistics while a model is trained", "Call its eval() first"
    return (
        f"{operation} has no lowering to HLO",
        f"Write it with other operations, {OUTSIDE}, or add a function for it to transformers_neuronx/trace/aten",
    )


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, list | tuple):
        return [each for part in value for each in _tensors(part)]
    return [value] if isinstance(value, torch.Tensor) else []
