"""The table of element types: HLO name, HLO number, NumPy type, PyTorch type.

PyTorch types are looked up by name on demand, so that graphs can be written and compiled without importing torch.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import ml_dtypes
import numpy as np

from transformers_neuronx.errors import GraphError
from transformers_neuronx.pyhlo import hlo_pb2

if TYPE_CHECKING:
    import torch


class ElementType(NamedTuple):
    """An element type. `bits` is its width on the device; NumPy stores s4 and u4 in one byte each."""

    name: str
    number: int
    numpy: np.dtype[Any]
    torch: str | None
    bits: int


def _row(name: str, numpy: Any, torch: str | None, bits: int) -> tuple[str, ElementType]:
    return name, ElementType(name, hlo_pb2.PrimitiveType.Value(name.upper()), np.dtype(numpy), torch, bits)


ELEMENT_TYPES: dict[str, ElementType] = dict(
    [
        _row("pred", np.bool_, "bool", 8),
        _row("s4", ml_dtypes.int4, None, 4),
        _row("s8", np.int8, "int8", 8),
        _row("s16", np.int16, "int16", 16),
        _row("s32", np.int32, "int32", 32),
        _row("s64", np.int64, "int64", 64),
        _row("u4", ml_dtypes.uint4, None, 4),
        _row("u8", np.uint8, "uint8", 8),
        _row("u16", np.uint16, "uint16", 16),
        _row("u32", np.uint32, "uint32", 32),
        _row("u64", np.uint64, "uint64", 64),
        _row("f8e4m3fn", ml_dtypes.float8_e4m3fn, "float8_e4m3fn", 8),
        _row("f8e5m2", ml_dtypes.float8_e5m2, "float8_e5m2", 8),
        _row("bf16", ml_dtypes.bfloat16, "bfloat16", 16),
        _row("f16", np.float16, "float16", 16),
        _row("f32", np.float32, "float32", 32),
        _row("f64", np.float64, "float64", 64),
        _row("c64", np.complex64, "complex64", 64),
        _row("c128", np.complex128, "complex128", 128),
    ]
)

_BY_NUMPY = {row.numpy: row for row in ELEMENT_TYPES.values()}
_BY_TORCH = {row.torch: row for row in ELEMENT_TYPES.values()}
FLOATS = frozenset({"f8e4m3fn", "f8e5m2", "bf16", "f16", "f32", "f64"})
COMPLEX = frozenset({"c64", "c128"})
INTEGERS = frozenset(name for name in ELEMENT_TYPES if name[0] in "su")


def element_type(name: str) -> ElementType:
    """Return the row of the type `name`, such as "bf16"."""
    if name not in ELEMENT_TYPES:
        raise GraphError(f"unknown element type {name!r}; expected one of {', '.join(ELEMENT_TYPES)}")
    return ELEMENT_TYPES[name]


@cache
def limits(name: str) -> tuple[float, float]:
    """Return the smallest and the largest value of the type `name`; they are infinite if the type has infinities."""
    row = element_type(name)
    if name == "pred":
        return False, True
    if name in INTEGERS:
        integers: Any = ml_dtypes.iinfo(row.numpy)  # type: ignore[no-untyped-call]
        return int(integers.min), int(integers.max)
    if np.isinf(np.array(np.inf).astype(row.numpy).astype(np.float64)):
        return -np.inf, np.inf
    finite: Any = ml_dtypes.finfo(row.numpy)  # type: ignore[no-untyped-call]
    return float(finite.min), float(finite.max)


def from_numpy(dtype: Any) -> ElementType:
    """Return the row of NumPy's `dtype`."""
    if (row := _BY_NUMPY.get(np.dtype(dtype))) is None:
        raise GraphError(f"no HLO element type holds NumPy's {np.dtype(dtype)}")
    return row


def from_torch(dtype: torch.dtype) -> ElementType:
    """Return the row of PyTorch's `dtype`."""
    if (row := _BY_TORCH.get(str(dtype).removeprefix("torch."))) is None:
        raise GraphError(f"no HLO element type holds {dtype}")
    return row


def to_torch(name: str) -> torch.dtype:
    """Return PyTorch's type for the HLO type `name`."""
    import torch

    row = element_type(name)
    if row.torch is None:
        raise GraphError(f"PyTorch has no type for {name}")
    dtype = getattr(torch, row.torch)
    assert isinstance(dtype, torch.dtype)
    return dtype


def torch_to_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """View a contiguous CPU tensor as a NumPy array, also for types that PyTorch cannot convert."""
    import torch

    row = from_torch(tensor.dtype)
    tensor = tensor.detach().contiguous()
    if row.numpy.isbuiltin == 1:
        return tensor.numpy()
    raw = {8: torch.uint8, 16: torch.int16}[row.bits]
    return tensor.view(raw).numpy().view(row.numpy)


def numpy_to_torch(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """View `array` as a tensor, also for types that PyTorch cannot convert."""
    import torch

    row = from_numpy(array.dtype)
    array = np.ascontiguousarray(array)
    if row.numpy.isbuiltin == 1:
        return torch.from_numpy(array)
    raw = {8: np.uint8, 16: np.int16}[row.bits]
    return torch.from_numpy(array.view(raw)).view(to_torch(row.name))
