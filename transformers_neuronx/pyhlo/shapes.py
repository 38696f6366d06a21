"""Properties of shapes in the wire format: their arrays, number of elements, bytes and text."""

from __future__ import annotations

import math

from transformers_neuronx.pyhlo.dtypes import element_type
from transformers_neuronx.pyhlo.hlo_pb2 import TUPLE, PrimitiveType, ShapeProto


def element_bits(shape: ShapeProto) -> int:
    """Bits of each element of an array."""
    return element_type(PrimitiveType.Name(shape.element_type).lower()).bits


def arrays_of(shape: ShapeProto) -> list[ShapeProto]:
    """Return an array as a list of one, or all arrays in a tuple."""
    if shape.element_type != TUPLE:
        return [shape]
    return [array for element in shape.tuple_shapes for array in arrays_of(element)]


def elements(shape: ShapeProto) -> int:
    """Count the elements of an array, or of all arrays in a tuple."""
    return sum(math.prod(array.dimensions) for array in arrays_of(shape))


def nbytes(shape: ShapeProto) -> int:
    """Count the bytes of an array, rounded up, or of all arrays in a tuple."""
    return sum(-(-math.prod(array.dimensions) * element_bits(array) // 8) for array in arrays_of(shape))


def shape_text(shape: ShapeProto) -> str:
    """Format a shape as the scribe does: f32[8,16]."""
    if shape.element_type == TUPLE:
        return f"({', '.join(map(shape_text, shape.tuple_shapes))})"
    return f"{PrimitiveType.Name(shape.element_type).lower()}[{','.join(map(str, shape.dimensions))}]"
