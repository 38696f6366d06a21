"""`gen_randn_hlo_snapshot`: a module with random arguments, as XLA's own tools read it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from transformers_neuronx.original.compiler import gen_randn_inputs, primitive2name
from transformers_neuronx.pyhlo import HloModuleProto, hlo_pb2
from transformers_neuronx.pyhlo.dtypes import torch_to_numpy

BYTES = ("pred", "u8", "s8", "f16", "bf16", "f8e4m3fn", "f8e5m2", "u16", "s16")  # types whose literals are bytes


class HloSnapshot:
    """XLA's message HloSnapshot: a module, and its arguments as literals."""

    def __init__(self, module: HloModuleProto, arguments: Sequence[hlo_pb2.LiteralProto]) -> None:
        self.module, self.arguments = module, list(arguments)

    def SerializeToString(self) -> bytes:  # noqa: N802
        """Return the message in protobuf's format: field 1 is an HloProto, whose field 1 is the module."""
        hlo = _field(1, self.module.SerializeToString())
        return _field(1, hlo) + b"".join(_field(2, literal.SerializeToString()) for literal in self.arguments)


def gen_hlo_snapshot(hlo_module: HloModuleProto, inputs: Sequence[torch.Tensor]) -> HloSnapshot:
    """Return a module with these arguments."""
    shapes = hlo_module.host_program_shape.parameters
    return HloSnapshot(hlo_module, [_literal(shape, tensor) for shape, tensor in zip(shapes, inputs, strict=True)])


def _literal(shape: hlo_pb2.ShapeProto, tensor: torch.Tensor) -> hlo_pb2.LiteralProto:
    name, array = primitive2name(shape.element_type), torch_to_numpy(tensor).ravel()
    literal = hlo_pb2.LiteralProto(shape=shape)
    if name == "pred":
        literal.preds.extend(array.tolist())
    elif name in BYTES:
        setattr(literal, f"{name}s", array.tobytes())
    else:
        getattr(literal, f"{name}s").extend(np.asarray(array).tolist())
    return literal


def _field(number: int, content: bytes) -> bytes:
    """Return a field of bytes in protobuf's format."""
    size, length = len(content), b""
    while size > 127:
        length += bytes([size & 127 | 128])
        size >>= 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + content


def main_randn() -> None:
    """Run the command `gen_randn_hlo_snapshot`."""
    parser = argparse.ArgumentParser(description="Write a module with random arguments, for XLA's tools.")
    parser.add_argument("module", help="file of an HloModuleProto")
    parser.add_argument("snapshot", help="file to write")
    parser.add_argument("--std", type=float, default=0.01, help="standard deviation of numbers (default: 0.01)")
    parser.add_argument("--int", default="zeros", help="torch function that makes integers (default: zeros)")
    parser.add_argument("--treat_as_int", nargs="*", type=int, help="parameters that are made as integers are")
    given = parser.parse_args()
    module = HloModuleProto.FromString(Path(given.module).read_bytes())
    torch.manual_seed(0)
    inputs = gen_randn_inputs(module, given.std, getattr(torch, given.int), given.treat_as_int)
    Path(given.snapshot).write_bytes(gen_hlo_snapshot(module, inputs).SerializeToString())
