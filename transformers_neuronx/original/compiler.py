"""Helpers of the original's `compiler`: facts of a module, and tensors that fit its parameters."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from transformers_neuronx.neuron.compiling import flags
from transformers_neuronx.neuron.metaneff import TYPES, metaneff_of
from transformers_neuronx.neuron.metaneff_pb2 import MetaNeff
from transformers_neuronx.pyhlo import HloModuleProto, hlo_pb2
from transformers_neuronx.pyhlo.dtypes import element_type, from_torch, to_torch


def get_compiler_flags() -> str:
    """Return the options for neuronx-cc: those of NEURON_CC_FLAGS, and this package's own that they do not replace."""
    return " ".join(flags())


def get_hash_module(hlo_module: HloModuleProto, flags: str | None) -> str:
    """Return 20 hexadecimal digits that tell modules and compiler options apart."""
    told = hlo_module.SerializeToString(deterministic=True) + (flags or "").replace(" ", "").encode()
    return hashlib.sha256(told).hexdigest()[:20]


def hash_hlo(hlo_module: HloModuleProto) -> str:
    """Return 20 hexadecimal digits that tell modules apart."""
    return get_hash_module(hlo_module, None)


def hlo2metaneff(hlo_module: HloModuleProto) -> MetaNeff:
    """Return what the Neuron runtime needs to know of a module's inputs and outputs."""
    return metaneff_of(hlo_module)


def find_input_names(hlo_module: HloModuleProto) -> list[str]:
    """Return the names of a module's inputs for the Neuron runtime: input0, input1, …"""
    return [tensor.name.decode() for tensor in metaneff_of(hlo_module).input_tensors]


def find_output_names(hlo_module: HloModuleProto) -> list[str]:
    """Return the names of a module's outputs for the Neuron runtime: output0, output1, …"""
    return [tensor.name.decode() for tensor in metaneff_of(hlo_module).output_tensors]


def dump_proto(proto: HloModuleProto, path: str | PathLike[str]) -> None:
    """Write a message to a file in protobuf's format."""
    Path(path).write_bytes(proto.SerializeToString())


def dump_proto_str(proto: HloModuleProto, path: str | PathLike[str]) -> None:
    """Write a message to a file as text."""
    Path(path).write_text(str(proto))


def primitive2name(element_type: int) -> str:
    """Return the name of an element type of HLO: "f32" for 11."""
    return hlo_pb2.PrimitiveType.Name(element_type).lower()


class DataTypeConverter:
    """Converts element types of HLO, by their numbers, to those of torch and of the Neuron runtime."""

    def hlo2metaneff(self, primitive_type: int) -> int:
        return TYPES[primitive_type]  # type: ignore[index]

    def hlo2torch(self, primitive_type: int) -> torch.dtype:
        return to_torch(primitive2name(primitive_type))

    def torch2name(self, torch_dtype: torch.dtype) -> str:
        return from_torch(torch_dtype).name

    def torch2hlo(self, torch_dtype: torch.dtype) -> int:
        return from_torch(torch_dtype).number


def gen_zero_output_from_shape_proto(input: Any) -> torch.Tensor:  # noqa: A002
    """Return zeros of a `ShapeProto`."""
    return torch.zeros(tuple(input.dimensions), dtype=to_torch(primitive2name(input.element_type)))


def gen_zero_output_from_shape(input: Any) -> torch.Tensor:  # noqa: A002
    """Return zeros of the shape and type of a tensor in a graph."""
    return torch.zeros(tuple(input.sizes), dtype=to_torch(input.dtype.name))


def gen_zero_input(hlo_module: HloModuleProto, index: int) -> torch.Tensor:
    """Return zeros for one parameter of a module."""
    return gen_zero_output_from_shape_proto(hlo_module.host_program_shape.parameters[index])


def gen_zero_output(hlo_module: HloModuleProto, index: int | None = None) -> torch.Tensor:
    """Return zeros of the shape of a module's result, or of one part of its tuple."""
    result = hlo_module.host_program_shape.result
    return gen_zero_output_from_shape_proto(result if index is None else result.tuple_shapes[index])


def gen_zero_inputs(hlo_module: HloModuleProto) -> list[torch.Tensor]:
    """Return zeros for all parameters of a module."""
    return gen_randn_inputs(hlo_module, std=0)


def gen_randn_inputs(
    hlo_module: HloModuleProto,
    std: float = 0.01,
    int_func: Callable[..., torch.Tensor] = torch.zeros,
    treat_as_int: Collection[int] | None = None,
) -> list[torch.Tensor]:
    """Return tensors for all parameters of a module: normal random numbers, and `int_func(sizes, dtype=…)` for integers
    and for the parameters numbered in `treat_as_int`.
    """
    made = []
    for number, shape in enumerate(hlo_module.host_program_shape.parameters):
        tensor = gen_zero_output_from_shape_proto(shape)
        random = std and tensor.is_floating_point() and number not in (treat_as_int or ())
        drawn = (std * torch.randn(tensor.shape)).to(tensor.dtype)
        made.append(drawn if random else int_func(tensor.shape, dtype=tensor.dtype))
    return made


def get_total_input_tensors_size(hlo_module: HloModuleProto) -> float:
    """Return the bytes of all parameters of a module."""
    shapes = hlo_module.host_program_shape.parameters
    return sum(prod(each.dimensions) * element_type(primitive2name(each.element_type)).bits / 8 for each in shapes)
