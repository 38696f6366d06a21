"""What follows from a shape on the wire: its arrays, how many elements, how many bytes, and its text."""

from __future__ import annotations

import math

from transformers_neuronx.pyhlo.dtypes import element_type
from transformers_neuronx.pyhlo.hlo_pb2 import TUPLE, PrimitiveType, ShapeProto


def element_bits(shape: ShapeProto) -> int:
    """Of each element of an array."""
    return element_type(PrimitiveType.Name(shape.element_type).lower()).bits


def arrays_of(shape: ShapeProto) -> list[ShapeProto]:
    """An array; of a tuple, all arrays in it."""
    if shape.element_type != TUPLE:
        return [shape]
    return [array for element in shape.tuple_shapes for array in arrays_of(element)]


def elements(shape: ShapeProto) -> int:
    """Of an array; of a tuple, of all arrays in it."""
    return sum(math.prod(array.dimensions) for array in arrays_of(shape))


def nbytes(shape: ShapeProto) -> int:
    """Of an array, whole bytes; of a tuple, of all arrays in it."""
    return sum(-(-math.prod(array.dimensions) * element_bits(array) // 8) for array in arrays_of(shape))


def shape_text(shape: ShapeProto) -> str:
    """As the scribe writes it: f32[8,16]."""
    if shape.element_type == TUPLE:
        return f"({', '.join(map(shape_text, shape.tuple_shapes))})"
    return f"{PrimitiveType.Name(shape.element_type).lower()}[{','.join(map(str, shape.dimensions))}]"
