"""Where in the caller's code something is asked for, in words."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch.fx import Node

OURS, THEIRS = str(Path(__file__).parent), str(Path(torch.__file__).parent)


def module_of(node: Node) -> tuple[str, str]:
    """The path and the class of the module that a node comes from."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path, kind = stack[-1] if stack else ("", "")
    path = path.removeprefix("func").removeprefix(".")
    return path, str(getattr(kind, "__name__", kind)).rpartition(".")[2]


def origin(node: Node) -> str:
    """Who asks for a node, and in which line."""
    path, kind = module_of(node)
    frames = re.findall(r'File "(.*?)", line (\d+), in \S+\n\s*(.*)', node.meta.get("stack_trace") or "")
    frames = [frame for frame in frames if not frame[0].startswith(OURS)]
    frames = [frame for frame in frames if not frame[0].startswith(THEIRS)] or frames
    where = f" in {frames[-1][0]}, line {frames[-1][1]}: {frames[-1][2]}" if frames else ""
    return f"{f'{path} ({kind})' if path else 'The function'} asks for it{where}."
