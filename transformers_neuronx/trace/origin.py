"""Where in the caller's code something is asked for, in words; and of what PyTorch raises there."""

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
OURSELVES = "_Flat"  # the module around a function, of `export`
GENERATED = ("<eval_with_key", "<string>")  # what PyTorch makes of graphs
SCRIPTED: Any = torch.jit.ScriptModule
RAISE = dis.opmap["RAISE_VARARGS"]


def module_of(node: Node) -> tuple[str, str]:
    """The path and the class of the module that a node comes from."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path, kind = stack[-1] if stack else ("", "")
    path = path.removeprefix("func").removeprefix(".")
    name = str(getattr(kind, "__name__", kind)).rpartition(".")[2]
    return path, name if name != OURSELVES else ""


def origin(node: Node) -> str:
    """Who asks for a node, and in which line."""
    path, kind = module_of(node)
    frames = re.findall(r'File "(.*?)", line (\d+), in \S+\n\s*(.*)', node.meta.get("stack_trace") or "")
    frames = [frame for frame in frames if not frame[0].startswith((OURS, *GENERATED))]
    frames = [frame for frame in frames if not frame[0].startswith(THEIRS)] or frames
    return _asks(path, kind, *frames[-1:])


def _asks(path: str, kind: str, frame: tuple[Any, Any, Any] | None = None) -> str:
    where = " in {}, line {}, `{:.120}`".format(*frame) if frame else ""
    return f"{f'{path} ({kind})' if path else kind or 'The function'} asks for it{where}."


def explained(error: Exception, func: Callable[..., Any]) -> Exception:
    """What a function has raised while PyTorch ran it on tensors without elements; in our words what PyTorch has."""
    from torch.fx.experimental.symbolic_shapes import (
        GuardOnDataDependentSymNode,
    )  # with SymPy: what loads needs neither

    if isinstance(error, TransformersNeuronxError) or not _is_theirs(error):
        return error
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException | GuardOnDataDependentSymNode):
        return GraphError(
            "what is computed, or how much of it, follows from the values of tensors here, and a program is the same "
            f"for all values. {_asked(error, func)} Use torch.where or torch.cond, of which both sides are computed, "
            "or do this before or after what is traced"
        )
    if any(isinstance(frame.f_locals.get("self"), SCRIPTED) for frame, _ in traceback.walk_tb(error.__traceback__)):
        return GraphError(f"a ScriptModule cannot be traced: use what it was made of. {_asked(error, func)}")
    return GraphError(
        f"PyTorch cannot trace this: {summary(error)}. {_asked(error, func)} Write it with other operations of "
        "PyTorch, or do it before or after what is traced"
    )


def summary(error: Exception) -> str:
    """The first line of what it says, which is followed by graphs and advice for people who write PyTorch."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__


def _is_theirs(error: Exception) -> bool:
    """Whether PyTorch has raised it, in Python or in C++."""
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
    """Who was running, and in which line, of those frames that are neither PyTorch's nor ours."""
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
