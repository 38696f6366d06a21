"""What follows from a shape on the wire: how many elements, how many bytes, and its text."""

from __future__ import annotations

import math

from transformers_neuronx.pyhlo.dtypes import element_type
from transformers_neuronx.pyhlo.hlo_pb2 import TUPLE, PrimitiveType, ShapeProto


def element_bits(shape: ShapeProto) -> int:
    """Of each element of an array."""
    return element_type(PrimitiveType.Name(shape.element_type).lower()).bits


def elements(shape: ShapeProto) -> int:
    """Of an array; of a tuple, of all arrays in it."""
    if shape.element_type == TUPLE:
        return sum(map(elements, shape.tuple_shapes))
    return math.prod(shape.dimensions)


def nbytes(shape: ShapeProto) -> int:
    """Of an array, whole bytes; of a tuple, of all arrays in it."""
    if shape.element_type == TUPLE:
        return sum(map(nbytes, shape.tuple_shapes))
    return -(-elements(shape) * element_bits(shape) // 8)


def shape_text(shape: ShapeProto) -> str:
    """As the scribe writes it: f32[8,16]."""
    if shape.element_type == TUPLE:
        return f"({', '.join(map(shape_text, shape.tuple_shapes))})"
    return f"{PrimitiveType.Name(shape.element_type).lower()}[{','.join(map(str, shape.dimensions))}]"
