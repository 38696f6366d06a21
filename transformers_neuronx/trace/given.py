"""Check the arguments of `trace`: the function, its example inputs and aliases, and the kinds of tensors."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from transformers_neuronx.errors import GraphError

INPUTS = "example_inputs must be a tensor, or a tuple or list with a tensor or None for each argument in order"
RESERVED = {"self", "torch"}  # names that TorchScript functions reserve


def function_of(func: Any) -> Callable[..., Any]:
    """Return a function in a form that PyTorch traces. Raises GraphError unless it is a Python function or module."""
    if isinstance(func, type):
        raise GraphError(f"trace expects a module or a function, got the class {func.__name__}: pass an instance of it")
    if not callable(func):
        raise GraphError(f"trace expects a module or a function, got {type(func).__name__}")
    if isinstance(func, torch.jit.ScriptModule) and type(func).__name__ != "TopLevelTracedModule":  # of torch.jit.trace
        raise GraphError(
            f"trace expects a Python module or function, got a ScriptModule, {func.original_name}: trace the module "
            "that it was made from"
        )
    return func if isinstance(func, torch.nn.Module) else _as_forward(func)


def _as_forward(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same function named "forward", because PyTorch finds the caller's lines by that name."""
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
    """Return the example inputs as a tuple, one for each argument."""
    if isinstance(example_inputs, torch.Tensor):
        return (example_inputs,)
    if isinstance(example_inputs, str | bytes | dict) or not hasattr(example_inputs, "__iter__"):
        raise GraphError(f"{INPUTS}, got {'None' if example_inputs is None else type(example_inputs).__name__}")
    if not isinstance(example_inputs, tuple | list) and hasattr(example_inputs, "__array__"):
        raise GraphError(f"{INPUTS}, got {type(example_inputs).__name__}: convert an array with torch.from_numpy")
    return tuple(example_inputs)


def check_aliases(aliases: Any, count: int) -> None:
    """Raise GraphError unless these map tensors to output numbers below `count`."""
    wrong = (
        [each for each in aliases if not isinstance(each, torch.Tensor)] if isinstance(aliases, Mapping) else [aliases]
    )
    if wrong:
        raise GraphError(
            "input_output_aliases must map tensors to the numbers of the outputs that replace them, "
            f"got {type(wrong[0]).__name__}"
        )
    for number in aliases.values():
        if not isinstance(number, int) or not 0 <= number < count:
            raise GraphError(f"input_output_aliases must number one of the {count} outputs, got {number!r}")


def argument_names(func: Callable[..., Any], inputs: Sequence[Any]) -> list[str]:
    """Return `func`'s names of its first arguments, one for each example input.

    Arguments of `*args`, of functions written in C, and with names that TorchScript cannot use are numbered.
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
            f"the function must accept the {len(inputs)} example inputs as positional arguments: {error}"
        ) from None
    numbered = [f"input_{number}" for number in range(len(inputs))]
    return [
        name if name.isascii() and name not in RESERVED else number
        for name, number in zip(named, numbered, strict=False)
    ] + numbered[len(named) :]


def check_inputs(names: Sequence[str], inputs: Sequence[Any]) -> None:
    """Raise GraphError unless each is None or a tensor that a program can take."""
    for name, value in zip(names, inputs, strict=True):
        if not isinstance(value, torch.Tensor | None):
            raise GraphError(
                f"each example input must be a tensor or None, got {type(value).__name__} for {name!r}: "
                "wrap the function in one that takes only its tensors, each as an argument"
            )
        if value is not None:
            check_kind(name, value)


def check_kind(name: str, tensor: torch.Tensor) -> None:
    """Raise GraphError unless a tensor is dense and on the host."""
    if tensor.is_nested:
        kind, remedy = "a nested tensor", "pad it with torch.nested.to_padded_tensor"
    elif tensor.layout != torch.strided:
        kind, remedy = f"a tensor of layout {tensor.layout}", "call to_dense()"
    elif tensor.is_quantized:
        kind, remedy = "a quantized tensor", "call dequantize()"
    elif tensor.device.type == "meta":
        kind, remedy = "a tensor on device meta", "it has a shape, but no elements"
    elif tensor.device.type != "cpu":
        kind, remedy = f"a tensor on device {tensor.device}", "call cpu()"
    else:
        return
    raise GraphError(f"{name} must be a dense tensor on the CPU, got {kind}: {remedy}")


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with lazy negation and conjugation applied."""
    return tensor.resolve_neg().resolve_conj()
