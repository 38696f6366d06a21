"""Find the caller's source line of an operation, and explain the errors that PyTorch raises there."""

from __future__ import annotations

import dis
import linecache
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx import Node

from transformers_neuronx.errors import GraphError, TransformersNeuronxError

OURS, THEIRS = str(Path(__file__).parent), str(Path(torch.__file__).parent)
OURSELVES = "_Flat"  # the wrapper module in `export`
GENERATED = ("<eval_with_key", "<string>")  # code that PyTorch generates from graphs
SCRIPTED: Any = torch.jit.ScriptModule
RAISE = dis.opmap["RAISE_VARARGS"]


def module_of(node: Node) -> tuple[str, str]:
    """Return the path and the class name of the module that a node comes from."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path, kind = stack[-1] if stack else ("", "")
    path = path.removeprefix("func").removeprefix(".")
    name = str(getattr(kind, "__name__", kind)).rpartition(".")[2]
    return path, name if name != OURSELVES else ""


def origin(node: Node) -> str:
    """Return a sentence with a node's module and source line."""
    path, kind = module_of(node)
    frames = re.findall(r'File "(.*?)", line (\d+), in \S+\n\s*(.*)', node.meta.get("stack_trace") or "")
    frames = [frame for frame in frames if not frame[0].startswith((OURS, *GENERATED))]
    frames = [frame for frame in frames if not frame[0].startswith(THEIRS)] or frames
    return _asks(path, kind, *frames[-1:])


def _asks(path: str, kind: str, frame: tuple[Any, Any, Any] | None = None) -> str:
    where = " in {}, line {}, `{:.120}`".format(*frame) if frame else ""
    return f"Source: {f'{path} ({kind})' if path else kind or 'the function'}{where}."


def explained(error: Exception, func: Callable[..., Any]) -> Exception:
    """Return the exception to raise for `error`: the function's own unchanged, PyTorch's as a GraphError."""
    from torch.fx.experimental.symbolic_shapes import (
        GuardOnDataDependentSymNode,
    )  # imports SymPy, which loading does not need

    if isinstance(error, TransformersNeuronxError) or not _is_theirs(error):
        return error
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException | GuardOnDataDependentSymNode):
        return GraphError(
            "the operations or their sizes depend on tensor values here, but a program is the same for all values. "
            f"{_asked(error, func)} Use torch.where or torch.cond, which compute both branches, "
            "or do this outside the traced function"
        )
    if any(isinstance(frame.f_locals.get("self"), SCRIPTED) for frame, _ in traceback.walk_tb(error.__traceback__)):
        return GraphError(f"a ScriptModule cannot be traced: use the module it was made from. {_asked(error, func)}")
    return GraphError(
        f"PyTorch cannot trace this: {summary(error)}. {_asked(error, func)} Use other PyTorch operations, "
        "or do this outside the traced function"
    )


def summary(error: Exception) -> str:
    """Return the first line of the error's text. The rest is graphs and advice for PyTorch developers."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__


def _is_theirs(error: Exception) -> bool:
    """Return whether PyTorch raised the error, in Python or in C++."""
    last = error.__traceback__
    assert last
    while last.tb_next:
        last = last.tb_next
    code = last.tb_frame.f_code
    if code.co_filename.startswith((THEIRS, *GENERATED)):
        return True
    raised_there = code.co_code[last.tb_lasti] == RAISE
    return type(error) is RuntimeError and not raised_there and not code.co_filename.startswith(OURS)


def _asked(error: Exception, func: Callable[..., Any]) -> str:
    """Describe the innermost frame that is neither PyTorch's nor this package's."""
    skipped = (OURS, THEIRS, *GENERATED)
    frames = [
        each for each in traceback.walk_tb(error.__traceback__) if not each[0].f_code.co_filename.startswith(skipped)
    ]
    if not frames:
        return _asks("", "")
    path, kind = "", ""
    for frame, _ in frames:
        if isinstance(module := frame.f_locals.get("self"), torch.nn.Module):
            modules = func.named_modules() if isinstance(func, torch.nn.Module) else ()
            path, kind = next((name for name, each in modules if each is module), ""), type(module).__name__
    frame, line = frames[-1]
    file = frame.f_code.co_filename
    return _asks(path, kind, (file, line, linecache.getline(file, line).strip()))
