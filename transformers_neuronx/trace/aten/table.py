"""The table that lowerings are registered in, and what they have in common.

A lowering is called as the operation is in the exported graph, with HLO tensors for its tensors, after one argument
more: `out`, the shape that PyTorch says will come out, or several of them. What it returns has to have that shape. Of
several results the first has always a shape in `out`, and another has None where nothing uses it.
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
    """Register a lowering of these operations of `torch.ops.aten`."""

    def register(lowering: F) -> F:
        TABLE.update(dict.fromkeys(operations, lowering))
        return lowering

    return register


def element_type_of(dtype: torch.dtype) -> DType:
    return dtype_named(from_torch(dtype).name)


def is_float(dtype: DType) -> bool:
    return dtype.name in FLOATS


def converted(x: Tensor, dtype: DType | str) -> Tensor:
    """`x` in another element type as PyTorch converts: whatever is not zero is true."""
    name = dtype if isinstance(dtype, str) else dtype.name
    return hlo.not_equal(x, 0) if name == "pred" and x.dtype.name != "pred" else hlo.convert(x, name)


def promoted(dtype: DType, *operands: Any) -> list[Any]:
    """The operands with tensors of this element type. Numbers take that of the tensors beside them anyway."""
    return [converted(x, dtype) if isinstance(x, Tensor) else x for x in operands]


def common_type(*operands: Any) -> DType:
    """The element type that PyTorch compares two operands in."""
    meta = [
        torch.empty([0] * len(x.sizes), dtype=to_torch(x.dtype.name), device="meta") if isinstance(x, Tensor) else x
        for x in operands
    ]
    return element_type_of(torch.result_type(*meta))


def wide(dtype: DType) -> DType:
    """The element type that PyTorch computes with inside an operation: at least f32."""
    return dtype_named("f32") if is_float(dtype) and dtype.element.bits < 32 else dtype


def widened(x: Tensor) -> Tensor:
    """`x` in that type."""
    return hlo.convert(x, wide(x.dtype))


def of_training(operation: str) -> GraphError:
    """What is said of an operation that draws numbers."""
    return GraphError(f"{operation} drops some numbers at random while a model is trained: call its eval() first")


def axes_of(x: Tensor, dim: int | Sequence[int] | None) -> list[int]:
    """The axes that `dim` means, from the front: all of them where it says none."""
    rank = len(x.sizes)
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return list(range(rank))
    return [axis % rank for axis in ([dim] if isinstance(dim, int) else dim)] if rank else []
