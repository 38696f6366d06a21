"""Literals: the values of constants in the wire format."""

from __future__ import annotations

from typing import Any

import numpy as np

from transformers_neuronx.errors import GraphError
from transformers_neuronx.pyhlo import hlo_pb2
from transformers_neuronx.pyhlo.tensors import Shape, TupleShape

# Types whose literals the wire format stores element by element; all others are stored as raw bytes.
_LISTED = {"pred", "s32", "s64", "u32", "u64", "f32", "f64"}


def literal_of(shape: Shape | TupleShape, fields: dict[str, Any]) -> hlo_pb2.LiteralProto:
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
