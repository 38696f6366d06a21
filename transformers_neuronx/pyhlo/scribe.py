"""Writes PyHLO functions as an HloModuleProto.

`dtype[sizes].Op(*operands, **fields)` appends one instruction; `fields` are those of the wire format. The scribe
manages names, ids, nested computations, aliases and source lines. It has no shape rules: the caller gives the shape
of the result, as in `f32[8, 16].Dot(a, b, ...)`. The functions of `hlo` infer it from the operands.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from transformers_neuronx.errors import GraphError
from transformers_neuronx.pyhlo import hlo_pb2
from transformers_neuronx.pyhlo.literals import literal_of
from transformers_neuronx.pyhlo.opcodes import OPCODES
from transformers_neuronx.pyhlo.tensors import (
    ACTIVE,
    DTYPES,
    Alias,
    Capture,
    DType,
    Output,
    Scribe,
    Shape,
    Tensor,
    TupleShape,
    Written,
    dtype_named,
)

_BUILDER_CODE = tuple(str(Path(__file__).parents[1] / name) for name in ("pyhlo", "hlo", "compiler.py"))
_CALLED = {"While": ("body", "condition"), "Conditional": ("branch_computations",)}

Traced = tuple[Tensor, hlo_pb2.HloComputationProto]
Function = Callable[["HloScribe"], Output]


class HloScribe(Scribe):
    """Runs a PyHLO function and holds the module it writes: `HloScribe()(function).module_proto`.

    `function(scribe)` gets its inputs by writing `Parameter`s and returns its output: a tensor, or several tensors,
    which become a tuple.
    """

    def __init__(self, *_ignored: Any) -> None:
        # The original's first argument chose a serialization; here there is only one.
        self.module_proto = hlo_pb2.HloModuleProto()
        self.aliases: list[Alias] = []
        self._open: list[list[hlo_pb2.HloInstructionProto]] = []
        self._captures: list[Capture | None] = []
        self._scopes: list[str] = []
        self._written: dict[Hashable, Written] = {}
        self._last_id = 0

    def __getattr__(self, name: str) -> DType:
        if name in DTYPES:
            return DTYPES[name]
        raise AttributeError(f"the scribe has no element type {name!r}; expected one of {', '.join(DTYPES)}")

    def get_dtype(self, name: str) -> DType:
        return dtype_named(name)

    def tuple(self, *shapes: Shape | TupleShape) -> TupleShape:
        return TupleShape(shapes)

    def __call__(self, function: Function) -> HloScribe:
        name = getattr(function, "__name__", type(function).__name__)
        token = ACTIVE.set(self)
        try:
            root, computation = self._trace(function, name)
        finally:
            ACTIVE.reset(token)
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
        self._scopes.append(name)
        try:
            yield
        finally:
            self._scopes.pop()

    def computation(
        self, function: Function, name: str, key: Hashable = None, capture: Capture | None = None
    ) -> Written:
        if key is not None and key in self._written:
            return self._written[key]
        root, proto = self._trace(function, name, capture)
        if key is not None:
            self._written[key] = proto.id, root.shape
        return proto.id, root.shape

    def write(self, shape: Shape | TupleShape, op: str, operands: Sequence[Tensor], fields: dict[str, Any]) -> Tensor:
        operands = [self.inside(op, operand) for operand in operands]
        called = self._called_computations(op, fields)
        name = fields.pop("name", None)
        if op == "Constant":
            fields["literal"] = literal_of(shape, fields)
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
        metadata = proto.metadata
        metadata.op_type, metadata.op_name = op, "/".join([*self._scopes, name or opcode])
        metadata.source_file, metadata.source_line = _caller()
        self._open[-1].append(proto)
        return Tensor(self, shape, proto, self._open[-1])

    def inside(self, op: str, operand: Tensor) -> Tensor:
        if not isinstance(operand, Tensor) or operand.scribe is not self:
            raise GraphError(f"{op} needs tensors of the graph that is being written, got {operand!r}")
        if operand.computation is self._open[-1]:
            return operand
        capture = self._captures[-1]
        if capture is None or not any(operand.computation is around for around in self._open):
            raise GraphError(f"{op} needs tensors of the computation that is being written, got {operand!r}")
        return capture(operand)

    def _called_computations(self, op: str, fields: dict[str, Any]) -> list[int]:
        called: list[int] = []
        for field in _CALLED.get(op, ("to_apply",)):
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


def _caller() -> tuple[str, int]:
    """Return the file and line of the graph code that wrote an instruction, skipping the builders in between."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _builds(frame.f_code.co_filename):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


@cache
def _builds(filename: str) -> bool:
    return filename.startswith(_BUILDER_CODE)
