"""The table of lowerings, and functions that they share.

A lowering takes `out` first, and then the operation's arguments in the exported graph, with HLO tensors for tensors.
`out` is PyTorch's shape of the result, or a list of shapes for several results. The lowering must return these shapes.
The first of several results always has a shape in `out`; another has None if nothing uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from transformers_neuronx import hlo
from transformers_neuronx.errors import GraphError
from transformers_neuronx.pyhlo import DType, Shape, Tensor, dtype_named
from transformers_neuronx.pyhlo.dtypes import FLOATS, from_torch, to_torch

Lowering = Callable[..., Any]
Results = Sequence[Shape | None]
F = TypeVar("F", bound=Lowering)
TABLE: dict[Any, Lowering] = {}


def lowers(*operations: Any) -> Callable[[F], F]:
    """Register a lowering of these `torch.ops.aten` operations."""

    def register(lowering: F) -> F:
        TABLE.update(dict.fromkeys(operations, lowering))
        return lowering

    return register


def element_type_of(dtype: torch.dtype) -> DType:
    return dtype_named(from_torch(dtype).name)


def is_float(dtype: DType) -> bool:
    return dtype.name in FLOATS


def converted(x: Tensor, dtype: DType | str) -> Tensor:
    """Convert `x` to another element type as PyTorch does: everything except zero is true."""
    name = dtype if isinstance(dtype, str) else dtype.name
    return hlo.not_equal(x, 0) if name == "pred" and x.dtype.name != "pred" else hlo.convert(x, name)


def promoted(dtype: DType, *operands: Any) -> list[Any]:
    """Convert the tensors among operands to an element type. Numbers take the type of the tensors in the same call."""
    return [converted(x, dtype) if isinstance(x, Tensor) else x for x in operands]


def common_type(*operands: Any) -> DType:
    """Return the element type in which PyTorch compares two operands."""
    meta = [
        torch.empty([0] * len(x.sizes), dtype=to_torch(x.dtype.name), device="meta") if isinstance(x, Tensor) else x
        for x in operands
    ]
    return element_type_of(torch.result_type(*meta))


def wide(dtype: DType) -> DType:
    """Return the element type in which PyTorch computes inside an operation: at least f32."""
    return dtype_named("f32") if is_float(dtype) and dtype.element.bits < 32 else dtype


def widened(x: Tensor) -> Tensor:
    """Convert `x` to the element type of `wide`."""
    return hlo.convert(x, wide(x.dtype))


def of_training(operation: str) -> GraphError:
    """Return the error for an operation that draws random numbers in training mode."""
    return GraphError(f"{operation} drops elements at random in training mode: call the model's eval() first")


def axes_of(x: Tensor, dim: int | Sequence[int] | None) -> list[int]:
    """Return the axes of `dim`, counted from the start. None or an empty list means all axes."""
    rank = len(x.sizes)
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return list(range(rank))
    return [axis % rank for axis in ([dim] if isinstance(dim, int) else dim)] if rank else []
