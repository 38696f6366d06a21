"""The values of the language: element types, shapes, and tensors. `f32[8, 16].Add(a, b)` writes an add and returns it.

A shape writes to the scribe that runs the function. This file knows that scribe only as the protocol `Scribe`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, Union

import numpy as np

from transformers_neuronx.errors import GraphError
from transformers_neuronx.pyhlo import hlo_pb2
from transformers_neuronx.pyhlo.dtypes import ELEMENT_TYPES, ElementType, element_type
from transformers_neuronx.pyhlo.opcodes import OPCODES

Output: TypeAlias = Union["Tensor", Sequence["Tensor"]]  # of a PyHLO function
Written: TypeAlias = tuple[int, Union["Shape", "TupleShape"]]  # a computation's id and the shape of its output
Capture: TypeAlias = Callable[["Tensor"], "Tensor"]
Alias: TypeAlias = tuple["Tensor", "Tensor", bool]  # an output, the parameter whose memory it reuses, whether it must


class Scribe(Protocol):
    """What a graph may ask of the scribe that writes it. Tensors know theirs, so operations need no argument for it.

    Attributes are element types, as in `scribe.f32`.
    """

    aliases: list[Alias]

    def __getattr__(self, name: str) -> DType: ...

    def get_dtype(self, name: str) -> DType:
        """Return the element type `name`, as the attribute of that name does. GraphError if there is none."""
        ...

    def tuple(self, *shapes: Shape | TupleShape) -> TupleShape:
        """Return a tuple's shape; a function with several results returns its `.Tuple(*tensors)`."""
        ...

    def scope(self, name: str) -> AbstractContextManager[None]:
        """Add `name` to the metadata of the instructions written inside, as in "layer.3/attention"."""
        ...

    def computation(
        self, function: Callable[[Any], Output], name: str, key: Hashable = None, capture: Capture | None = None
    ) -> Written:
        """Write a nested computation and return its id and output shape. Each `key` is written once in a module.

        `capture` maps a tensor of an enclosing computation to one inside; without it, using such a tensor is an error.
        """
        ...

    def write(self, shape: Shape | TupleShape, op: str, operands: Sequence[Tensor], fields: dict[str, Any]) -> Tensor:
        """Append one instruction to the open computation; `fields` are those of the wire format."""
        ...

    def inside(self, op: str, operand: Tensor) -> Tensor:
        """Return the operand as a tensor of the open computation."""
        ...


ACTIVE: ContextVar[Scribe] = ContextVar("the scribe that is being written to")


def active_scribe() -> Scribe:
    """Return the scribe of the PyHLO function that is running."""
    try:
        return ACTIVE.get()
    except LookupError:
        raise GraphError(
            "no graph is being written: call this inside a function that compile_py_func or HloScribe runs"
        ) from None


class DType:
    """An element type: `f32[8, 16]` is a shape, `f32.Op(...)` writes an operation with a scalar result."""

    def __init__(self, element: ElementType) -> None:
        self.element = element
        self.name = element.name

    def __getitem__(self, sizes: int | Sequence[int]) -> Shape:
        return Shape(self, tuple(sizes) if isinstance(sizes, Iterable) else (sizes,))

    def __getattr__(self, op: str) -> Callable[..., Tensor]:
        return getattr(self[()], op)  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Any, ...]:
        return dtype_named, (self.name,)


DTYPES = {name: DType(row) for name, row in ELEMENT_TYPES.items()}


def dtype_named(name: str) -> DType:
    """Return the element type `name`, such as "f32"; it is the same object in every graph."""
    return DTYPES[element_type(name).name]


class Shape:
    """An element type with sizes. Attributes are opcodes: `f32[2, 3].Add(a, b)` writes an add and returns it."""

    def __init__(self, dtype: DType, sizes: tuple[int, ...]) -> None:
        if any(not isinstance(size, int | np.integer) or size < 0 for size in sizes):
            raise GraphError(f"{dtype.name}{list(sizes)}: sizes must be integers that are not negative")
        self.dtype = dtype
        self.sizes = tuple(map(int, sizes))

    def __getattr__(self, op: str) -> Callable[..., Tensor]:
        return _instruction_writer(self, op)

    def __repr__(self) -> str:
        return f"{self.dtype.name}[{','.join(map(str, self.sizes))}]"

    def proto(self) -> hlo_pb2.ShapeProto:
        """Return the shape in the wire format, in row-major order. Others have it too: copy it before a change."""
        return _array_proto(self.dtype.element.number, self.sizes)


@lru_cache(maxsize=1024)
def _array_proto(number: int, sizes: tuple[int, ...]) -> hlo_pb2.ShapeProto:
    return hlo_pb2.ShapeProto(
        element_type=number,  # type: ignore[arg-type]
        dimensions=sizes,
        layout=hlo_pb2.LayoutProto(minor_to_major=range(len(sizes))[::-1]),
        is_dynamic_dimension=[False] * len(sizes),
    )


class TupleShape:
    """The shape of a tuple; `.Tuple(*tensors)` writes one."""

    def __init__(self, shapes: tuple[Shape | TupleShape, ...]) -> None:
        self.shapes = shapes

    def __getattr__(self, op: str) -> Callable[..., Tensor]:
        return _instruction_writer(self, op)

    def __repr__(self) -> str:
        return f"({', '.join(map(repr, self.shapes))})"

    def proto(self) -> hlo_pb2.ShapeProto:
        """Return the shape in the wire format."""
        return hlo_pb2.ShapeProto(element_type=hlo_pb2.TUPLE, tuple_shapes=[s.proto() for s in self.shapes])


def _instruction_writer(shape: Shape | TupleShape, op: str) -> Callable[..., Tensor]:
    if not op[:1].isupper():
        raise AttributeError(op)
    if op not in OPCODES:
        near = difflib.get_close_matches(op, OPCODES, n=1)
        # An AttributeError, because Python looks up many names on objects.
        raise AttributeError(f"{shape!r} has no operation {op!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    return partial(_write, shape, op)


def _write(shape: Shape | TupleShape, op: str, *operands: Tensor, **fields: Any) -> Tensor:
    return active_scribe().write(shape, op, operands, fields)


class Tensor:
    """The value of one instruction. `hlo` adds the arithmetic operators, with their shape rules."""

    def __init__(
        self,
        scribe: Scribe,
        shape: Shape | TupleShape,
        proto: hlo_pb2.HloInstructionProto,
        computation: list[hlo_pb2.HloInstructionProto],
    ) -> None:
        self.scribe, self.shape = scribe, shape
        self.proto, self.computation = proto, computation

    @property
    def dtype(self) -> DType:
        """Element type. GraphError for a tuple."""
        return self._array_shape.dtype

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the axes. GraphError for a tuple."""
        return self._array_shape.sizes

    @property
    def shape_proto(self) -> hlo_pb2.ShapeProto:
        """Shape in the wire format."""
        return self.proto.shape

    @property
    def _array_shape(self) -> Shape:
        if isinstance(self.shape, TupleShape):
            raise GraphError(f"{self!r} is a tuple: take one of its elements with GetTupleElement first")
        return self.shape

    def set_alias_to(self, parameter: Tensor, must: bool = False) -> None:
        """Let this output of the module reuse the memory of `parameter`; with `must`, require it."""
        self.scribe.aliases.append((self, parameter, must))

    def __repr__(self) -> str:
        return f"{self.proto.name}:{self.shape!r}"

    __hash__ = object.__hash__

    if TYPE_CHECKING:

        def __add__(self, other: Tensor | float) -> Tensor: ...
        def __radd__(self, other: float) -> Tensor: ...
        def __sub__(self, other: Tensor | float) -> Tensor: ...
        def __rsub__(self, other: float) -> Tensor: ...
        def __mul__(self, other: Tensor | float) -> Tensor: ...
        def __rmul__(self, other: float) -> Tensor: ...
        def __truediv__(self, other: Tensor | float) -> Tensor: ...
        def __rtruediv__(self, other: float) -> Tensor: ...
        def __neg__(self) -> Tensor: ...
        def __lt__(self, other: Tensor | float) -> Tensor: ...
        def __le__(self, other: Tensor | float) -> Tensor: ...
        def __gt__(self, other: Tensor | float) -> Tensor: ...
        def __ge__(self, other: Tensor | float) -> Tensor: ...
        def __and__(self, other: Tensor) -> Tensor: ...
        def __or__(self, other: Tensor) -> Tensor: ...
        def __invert__(self) -> Tensor: ...
