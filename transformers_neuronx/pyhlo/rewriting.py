"""A scribe that copies instructions from other modules, to rewrite a module in another form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from transformers_neuronx.pyhlo import hlo_pb2
from transformers_neuronx.pyhlo.scribe import HloScribe
from transformers_neuronx.pyhlo.tensors import Shape, Tensor, TupleShape, dtype_named


def shape_of(proto: hlo_pb2.ShapeProto) -> Shape | TupleShape:
    """Read a shape from the wire format."""
    if proto.element_type == hlo_pb2.TUPLE:
        return TupleShape(tuple(map(shape_of, proto.tuple_shapes)))
    return dtype_named(hlo_pb2.PrimitiveType.Name(proto.element_type).lower())[proto.dimensions]


class RewritingScribe(HloScribe):
    """A scribe that can also copy instructions."""

    def __init__(self) -> None:
        super().__init__()
        self._metadata: hlo_pb2.OpMetadata | None = None

    @contextmanager
    def source(self, metadata: hlo_pb2.OpMetadata) -> Iterator[None]:
        """Give this metadata to the instructions written inside."""
        before, self._metadata = self._metadata, metadata
        try:
            yield
        finally:
            self._metadata = before

    def write(self, shape: Shape | TupleShape, op: str, operands: Sequence[Tensor], fields: dict[str, Any]) -> Tensor:
        tensor = super().write(shape, op, operands, fields)
        if self._metadata is not None:
            tensor.proto.metadata.CopyFrom(self._metadata)
        return tensor

    def copy(
        self, instruction: hlo_pb2.HloInstructionProto, operands: Sequence[Tensor], called: Sequence[int] = ()
    ) -> Tensor:
        """Append an instruction of another module; `called` are the ids of its computations in this module."""
        self._last_id += 1
        proto = hlo_pb2.HloInstructionProto()
        proto.CopyFrom(instruction)
        proto.id, proto.name = self._last_id, f"{instruction.name.partition('.')[0]}.{self._last_id}"
        proto.operand_ids[:] = [self.inside(instruction.opcode, operand).proto.id for operand in operands]
        proto.called_computation_ids[:] = called
        self._open[-1].append(proto)
        return Tensor(self, shape_of(instruction.shape), proto, self._open[-1])
