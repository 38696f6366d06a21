"""What `trace` is given: the function, its example inputs, and what kinds of tensors those may be."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from transformers_neuronx.errors import GraphError

INPUTS = "example_inputs must be a tensor, or a tuple or list with a tensor or None for each argument in its order"
RESERVED = {"self", "torch"}  # what a TorchScript function needs for itself


def function_of(func: Any) -> Callable[..., Any]:
    """A function as PyTorch traces it. Raises GraphError for what is none, or none of Python."""
    if isinstance(func, type):
        raise GraphError(f"trace must be given a module or a function, got the class {func.__name__}: make one of it")
    if not callable(func):
        raise GraphError(f"trace must be given a module or a function, got {type(func).__name__}")
    if isinstance(func, torch.jit.ScriptModule) and type(func).__name__ != "TopLevelTracedModule":  # of torch.jit.trace
        raise GraphError(
            f"trace must be given a module or a function of Python, got a ScriptModule, {func.original_name}: trace "
            "what it was made of"
        )
    return func if isinstance(func, torch.nn.Module) else _as_forward(func)


def _as_forward(func: Callable[..., Any]) -> Callable[..., Any]:
    """The same function by the name "forward", by which PyTorch tells the lines of the caller's code from others."""
    inner = func if isinstance(func, types.FunctionType | types.MethodType) else type(func).__call__.__get__(func)
    if isinstance(inner, types.MethodType) and isinstance(inner.__func__, types.FunctionType):
        return types.MethodType(_as_forward(inner.__func__), inner.__self__)
    if not isinstance(inner, types.FunctionType):
        return func
    code = inner.__code__.replace(co_name="forward", co_qualname="forward")
    renamed = types.FunctionType(code, inner.__globals__, "forward", inner.__defaults__, inner.__closure__)
    renamed.__kwdefaults__ = inner.__kwdefaults__
    return renamed


def inputs_of(example_inputs: Any) -> tuple[Any, ...]:
    """Example inputs one by one."""
    if isinstance(example_inputs, torch.Tensor):
        return (example_inputs,)
    if isinstance(example_inputs, str | bytes | dict) or not hasattr(example_inputs, "__iter__"):
        raise GraphError(f"{INPUTS}, got {'None' if example_inputs is None else type(example_inputs).__name__}")
    if not isinstance(example_inputs, tuple | list) and hasattr(example_inputs, "__array__"):
        raise GraphError(f"{INPUTS}, got {type(example_inputs).__name__}: torch.from_numpy makes a tensor of an array")
    return tuple(example_inputs)


def check_aliases(aliases: Any, count: int) -> None:
    """Raise GraphError unless these are tensors, and for each the number of one of so many outputs."""
    wrong = (
        [each for each in aliases if not isinstance(each, torch.Tensor)] if isinstance(aliases, Mapping) else [aliases]
    )
    if wrong:
        raise GraphError(
            "input_output_aliases must be a dictionary of tensors, with the number of the output that replaces each; "
            f"got {type(wrong[0]).__name__}"
        )
    for number in aliases.values():
        if not isinstance(number, int) or not 0 <= number < count:
            raise GraphError(f"input_output_aliases must have the number of one of the {count} outputs, got {number!r}")


def argument_names(func: Callable[..., Any], inputs: Sequence[Any]) -> list[str]:
    """What `func` calls its first arguments, each of which has an example.

    Those of `*args`, of functions written in C, and whose names TorchScript cannot use, have numbers.
    """
    try:
        called = func.forward if isinstance(func, torch.nn.Module) else func
        signature = inspect.signature(called)
    except ValueError:
        return [f"input_{number}" for number in range(len(inputs))]
    parameters = list(signature.parameters.values())
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][: len(inputs)]
    if len(named) < len(inputs) and all(p.kind != p.VAR_POSITIONAL for p in parameters):
        raise GraphError(f"the function takes {len(named)} arguments, got {len(inputs)} example inputs")
    try:
        signature.bind(*inputs)
    except TypeError as error:
        raise GraphError(
            f"the function must be callable with the {len(inputs)} example inputs, by their places: {error}"
        ) from None
    numbered = [f"input_{number}" for number in range(len(inputs))]
    return [
        name if name.isascii() and name not in RESERVED else number
        for name, number in zip(named, numbered, strict=False)
    ] + numbered[len(named) :]


def check_inputs(names: Sequence[str], inputs: Sequence[Any]) -> None:
    """Raise GraphError unless all are tensors of a kind that a program takes, or None."""
    for name, value in zip(names, inputs, strict=True):
        if not isinstance(value, torch.Tensor | None):
            raise GraphError(
                f"trace wants tensors and None as example inputs, got {type(value).__name__} for {name!r}: "
                "wrap the function in one that takes its tensors one by one, and knows all else"
            )
        if value is not None:
            check_kind(name, value)


def check_kind(name: str, tensor: torch.Tensor) -> None:
    """Raise GraphError for a tensor that is not numbers in the memory of the host, one after the other."""
    if tensor.is_nested:
        kind, remedy = "a nested one", "torch.nested.to_padded_tensor pads it"
    elif tensor.layout != torch.strided:
        kind, remedy = f"one of layout {tensor.layout}", "to_dense() makes it dense"
    elif tensor.is_quantized:
        kind, remedy = "a quantized one", "dequantize() makes it one of floats"
    elif tensor.device.type == "meta":
        kind, remedy = "one on the device meta", "it has a shape, but no elements"
    elif tensor.device.type != "cpu":
        kind, remedy = f"one on the device {tensor.device}", "cpu() brings it to the host"
    else:
        return
    raise GraphError(f"{name} must be a dense tensor on the CPU, got {kind}: {remedy}")


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements as they are, where memory has them negated or conjugated."""
    return tensor.resolve_neg().resolve_conj()
