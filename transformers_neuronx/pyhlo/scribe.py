"""Writes PyHLO functions as an HloModuleProto.

`dtype[sizes].Op(*operands, **fields)` appends one instruction; `fields` are those of the wire format. The scribe
manages names, ids, nested computations, aliases and source lines. It has no shape rules: the caller gives the shape
of the result, as in `f32[8, 16].Dot(a, b, ...)`. The functions of `hlo` infer it from the operands.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

import numpy as np

from transformers_neuronx.errors import GraphError
from transformers_neuronx.pyhlo import hlo_pb2
from transformers_neuronx.pyhlo.dtypes import ELEMENT_TYPES, ElementType, element_type
from transformers_neuronx.pyhlo.opcodes import OPCODES

_ACTIVE: ContextVar[HloScribe] = ContextVar("the scribe that is being written to")
_BUILDER_CODE = tuple(str(Path(__file__).parents[1] / name) for name in ("pyhlo", "hlo", "compiler.py"))
# Types whose literals the wire format stores element by element; all others are stored as raw bytes.
_LISTED = {"pred", "s32", "s64", "u32", "u64", "f32", "f64"}

Written = tuple[int, Union["Shape", "TupleShape"]]  # a computation's id and the shape of its output
Traced = tuple["Tensor", hlo_pb2.HloComputationProto]
Function = Callable[["HloScribe"], Union["Tensor", Sequence["Tensor"]]]
Capture = Callable[["Tensor"], "Tensor"]


def active_scribe() -> HloScribe:
    """Return the scribe of the PyHLO function that is running."""
    try:
        return _ACTIVE.get()
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


_DTYPES = {name: DType(row) for name, row in ELEMENT_TYPES.items()}


def dtype_named(name: str) -> DType:
    """Return the element type `name`, such as "f32"; it is the same object in every graph."""
    return _DTYPES[element_type(name).name]


class Shape:
    """An element type with sizes. Attributes are opcodes: `f32[2, 3].Add(a, b)` writes an add and returns it."""

    def __init__(self, dtype: DType, sizes: tuple[int, ...]) -> None:
        if any(not isinstance(size, int | np.integer) or size < 0 for size in sizes):
            raise GraphError(f"{dtype.name}{list(sizes)}: sizes must be integers that are not negative")
        self.dtype = dtype
        self.sizes = tuple(int(size) for size in sizes)

    def __getattr__(self, op: str) -> Callable[..., Tensor]:
        return _instruction_writer(self, op)

    def __repr__(self) -> str:
        return f"{self.dtype.name}[{','.join(map(str, self.sizes))}]"

    def proto(self) -> hlo_pb2.ShapeProto:
        """Return the shape in the wire format, in row-major order."""
        return hlo_pb2.ShapeProto(
            element_type=self.dtype.element.number,  # type: ignore[arg-type]
            dimensions=self.sizes,
            layout=hlo_pb2.LayoutProto(minor_to_major=range(len(self.sizes))[::-1]),
            is_dynamic_dimension=[False] * len(self.sizes),
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
        scribe: HloScribe,
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


class HloScribe:
    """Runs a PyHLO function and holds the module it writes: `HloScribe()(function).module_proto`.

    `function(scribe)` gets its inputs by writing `Parameter`s and returns its output: a tensor, or several tensors,
    which become a tuple.
    """

    def __init__(self, *_ignored: Any) -> None:
        # The original's first argument chose a serialization; here there is only one.
        self.module_proto = hlo_pb2.HloModuleProto()
        self.aliases: list[tuple[Tensor, Tensor, bool]] = []
        self._open: list[list[hlo_pb2.HloInstructionProto]] = []
        self._captures: list[Capture | None] = []
        self._scopes: list[str] = []
        self._written: dict[Hashable, Written] = {}
        self._last_id = 0

    def __getattr__(self, name: str) -> DType:
        if name in _DTYPES:
            return _DTYPES[name]
        raise AttributeError(f"the scribe has no element type {name!r}; expected one of {', '.join(_DTYPES)}")

    def get_dtype(self, name: str) -> DType:
        """Return the element type `name`, as the attribute of that name does. GraphError if there is none."""
        return dtype_named(name)

    def tuple(self, *shapes: Shape | TupleShape) -> TupleShape:
        """Return a tuple's shape; a function with several results returns its `.Tuple(*tensors)`."""
        return TupleShape(shapes)

    def __call__(self, function: Function) -> HloScribe:
        name = getattr(function, "__name__", type(function).__name__)
        token = _ACTIVE.set(self)
        try:
            root, computation = self._trace(function, name)
        finally:
            _ACTIVE.reset(token)
        module = self.module_proto
        module.name = name
        module.entry_computation_name, module.entry_computation_id = computation.name, computation.id
        module.host_program_shape.CopyFrom(computation.program_shape)
        for tensor, parameter, must in self.aliases:
            if parameter.proto.opcode != "parameter":
                raise GraphError(f"set_alias_to needs a parameter of the module, got {parameter!r}")
            module.input_output_alias.entries.add(
                output_shape_index=_output_index(root, tensor),
                parameter_number=parameter.proto.parameter_number,
                kind=hlo_pb2.MUST_ALIAS if must else hlo_pb2.MAY_ALIAS,
            )
        self.aliases.clear()  # tensors refer to the scribe: avoid a reference cycle
        return self

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Add `name` to the metadata of the instructions written inside, as in "layer.3/attention"."""
        self._scopes.append(name)
        try:
            yield
        finally:
            self._scopes.pop()

    def computation(
        self, function: Function, name: str, key: Hashable = None, capture: Capture | None = None
    ) -> Written:
        """Write a nested computation and return its id and output shape. Each `key` is written once in a module.

        `capture` maps a tensor of an enclosing computation to one inside; without it, using such a tensor is an error.
        """
        if key is not None and key in self._written:
            return self._written[key]
        root, proto = self._trace(function, name, capture)
        if key is not None:
            self._written[key] = proto.id, root.shape
        return proto.id, root.shape

    def write(self, shape: Shape | TupleShape, op: str, operands: Sequence[Tensor], fields: dict[str, Any]) -> Tensor:
        """Append one instruction to the open computation; `fields` are those of the wire format."""
        operands = [self.inside(op, operand) for operand in operands]
        called = self._called_computations(op, fields)
        name = fields.pop("name", None)
        if op == "Constant":
            fields["literal"] = _literal(shape, fields)
        if isinstance(fields.get("backend_config"), str):
            fields["backend_config"] = fields["backend_config"].encode()
        self._last_id += 1
        opcode = OPCODES[op]
        try:
            proto = hlo_pb2.HloInstructionProto(
                name=f"{name or opcode}.{self._last_id}",
                opcode=opcode,
                shape=shape.proto(),
                id=self._last_id,
                operand_ids=[operand.proto.id for operand in operands],
                called_computation_ids=called,
                **fields,
            )
        except (TypeError, ValueError) as error:
            raise GraphError(f"{shape!r}.{op} got a field that the wire format does not accept: {error}") from error
        proto.metadata.op_type = op
        proto.metadata.op_name = "/".join([*self._scopes, name or opcode])
        proto.metadata.source_file, proto.metadata.source_line = _caller()
        self._open[-1].append(proto)
        return Tensor(self, shape, proto, self._open[-1])

    def inside(self, op: str, operand: Tensor) -> Tensor:
        """Return the operand as a tensor of the open computation."""
        if not isinstance(operand, Tensor) or operand.scribe is not self:
            raise GraphError(f"{op} needs tensors of the graph that is being written, got {operand!r}")
        if operand.computation is self._open[-1]:
            return operand
        capture = self._captures[-1]
        if capture is None or not any(operand.computation is around for around in self._open):
            raise GraphError(f"{op} needs tensors of the computation that is being written, got {operand!r}")
        return capture(operand)

    def _called_computations(self, op: str, fields: dict[str, Any]) -> list[int]:
        functions = {"While": ("body", "condition"), "Conditional": ("branch_computations",)}.get(op, ("to_apply",))
        called: list[int] = []
        for field in functions:
            value = fields.pop(field, ())
            for function in value if isinstance(value, list | tuple) else [value]:
                called.append(
                    function if isinstance(function, int) else self.computation(function, OPCODES[op] + "." + field)[0]
                )
        return called

    def _trace(self, function: Function, name: str, capture: Capture | None = None) -> Traced:
        instructions: list[hlo_pb2.HloInstructionProto] = []
        self._open.append(instructions)
        self._captures.append(capture)
        # XLA prefixes the caller's scope when it inlines a computation.
        scopes, self._scopes = self._scopes, []
        try:
            root = function(self)
            if isinstance(root, list | tuple):
                root = self.tuple(*(tensor.shape for tensor in root)).Tuple(*root)
            if not isinstance(root, Tensor):
                raise GraphError(f"{name} must return one tensor or several, got {root!r}")
            root = self.inside(name, root)
        finally:
            self._open.pop()
            self._captures.pop()
            self._scopes = scopes
        self._last_id += 1
        computation = self.module_proto.computations.add(
            name=f"{name}.{self._last_id}", id=self._last_id, root_id=root.proto.id, instructions=instructions
        )
        computation.program_shape.CopyFrom(_program_shape(name, instructions, root))
        return root, computation


def _program_shape(
    name: str, instructions: Sequence[hlo_pb2.HloInstructionProto], root: Tensor
) -> hlo_pb2.ProgramShapeProto:
    parameters = sorted((i for i in instructions if i.opcode == "parameter"), key=lambda i: i.parameter_number)
    if (numbers := [p.parameter_number for p in parameters]) != list(range(len(parameters))):
        raise GraphError(f"{name} needs parameter numbers 0, 1, 2, … without gaps or repeats, got {numbers}")
    return hlo_pb2.ProgramShapeProto(
        parameters=[p.shape for p in parameters],
        parameter_names=[p.name for p in parameters],
        result=root.proto.shape,
    )


def _output_index(root: Tensor, tensor: Tensor) -> list[int]:
    if tensor.proto.id == root.proto.id:
        return []
    outputs = list(root.proto.operand_ids) if root.proto.opcode == "tuple" else []
    if tensor.proto.id not in outputs:
        raise GraphError(f"set_alias_to needs an output of the module, got {tensor!r}")
    return [outputs.index(tensor.proto.id)]


def _literal(shape: Shape | TupleShape, fields: dict[str, Any]) -> hlo_pb2.LiteralProto:
    """Make a constant's literal from `constant_value` (anything NumPy accepts) or `literal`, a complete message."""
    literal = fields.pop("literal", None)
    if isinstance(literal, hlo_pb2.LiteralProto):
        return literal
    if isinstance(literal, dict):
        return hlo_pb2.LiteralProto(**{"shape": shape.proto(), **literal})
    if isinstance(shape, TupleShape):
        raise GraphError(f"Constant needs one array, got the tuple {shape!r}: make a Tuple of constants")
    if literal is None and "constant_value" not in fields:
        raise GraphError(f"{shape!r}.Constant needs a constant_value or a literal, got neither")
    value = fields.pop("constant_value") if literal is None else literal
    element = shape.dtype.element
    array = np.asarray(value).astype(element.numpy)
    if array.shape != shape.sizes:
        raise GraphError(f"Constant needs a value of its declared sizes, {shape!r}, got {list(array.shape)}")
    flat = array.reshape(-1)
    proto = hlo_pb2.LiteralProto(shape=shape.proto())
    field = f"{element.name}s"
    if element.name in _LISTED:
        getattr(proto, field).extend(flat.tolist())
    elif element.name in ("c64", "c128"):
        getattr(proto, field).extend(flat.view(np.float32 if element.name == "c64" else np.float64).tolist())
    else:
        setattr(proto, field, flat.tobytes())
    return proto


def _caller() -> tuple[str, int]:
    """Return the file and line of the graph code that wrote an instruction, skipping the builders in between."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_BUILDER_CODE):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno
