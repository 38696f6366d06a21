"""Documents run as their readers would run them: the blocks of code of a page, one after the other, as one program.

A block of `python` is run, and a block of `text` right after it is what it prints. In a block of `console`, lines after
`$` are commands, and the other lines are what the commands print. In both, `…` stands for anything. In blocks of
`text about` and of `console`, a number stands for any number, since times differ.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from transformers_neuronx import cli

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```(\w+(?: about)?)[^\n]*\n(.*?)^```$", re.S | re.M)


class Block(NamedTuple):
    """A block of code, the line of the page where it begins, and the block of text right after it."""

    language: str
    text: str
    line: int
    printed: Block | None = None


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found, after = [], None
    for match in reversed([*BLOCK.finditer(text)]):
        block = Block(match[1], match[2], text.count("\n", 0, match.start()) + 2)
        if after and after[1].language.startswith("text") and not text[match.end() : after[0]].strip():
            block = block._replace(printed=after[1])
        found.append(block)
        after = match.start(), block
    return found[::-1]


def commands(block: Block) -> Iterator[tuple[str, str]]:
    """The commands of a console block, each with what it prints."""
    for part in re.split(r"^\$ ", block.text, flags=re.M)[1:]:
        lines = part.split("\n")
        last = next(i for i, line in enumerate(lines) if not line.endswith("\\"))
        yield "\n".join(lines[: last + 1]), "\n".join(lines[last + 1 :])


def like(wanted: str, got: str, numbers: bool = False) -> bool:
    """Whether `got` is what a page shows as `wanted`, with any jaxlib; with `numbers`, each stands for any number."""
    pattern = re.escape(wanted.strip()).replace("…", ".*")
    pattern = re.sub(r"jaxlib\\ \d+(\\\.\d+)*", r"jaxlib\\ [\\d.]+", pattern)
    if numbers:
        pattern = re.sub(r"(\\ )*\d+([.,]\d+)*(e\\?[-+]\d+)?", r"\\s*[\\d.,]+(e[-+]\\d+)?", pattern)
    return re.fullmatch(pattern, "\n".join(line.rstrip() for line in got.strip().split("\n")), re.S) is not None


def run_console(block: Block, directory: Path) -> Iterator[tuple[str, str, str]]:
    """Each command with what it should print and what it prints, in `directory`, which is the current one.

    Commands of the package run in this process, which has imported all that they need.
    """
    for command, wanted in commands(block):
        own = command.startswith("transformers-neuronx ") and not set(command) & set("|>$`")
        yield command, wanted, run_command(command) if own else run_shell(command, directory)


def run_command(command: str) -> str:
    printed = io.StringIO()
    with (
        patch.object(sys, "argv", shlex.split(command)),
        patch.dict(os.environ, COLUMNS="80", NO_COLOR="1"),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
        contextlib.suppress(SystemExit),
    ):
        cli.main()
    return printed.getvalue()


def run_shell(command: str, directory: Path) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ran = subprocess.run(
        ["bash", "-c", command],
        cwd=directory,
        env=os.environ | dict(PATH=path, COLUMNS="80"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    return ran.stdout


def run_python(block: Block, page: Path, names: dict[str, object]) -> str:
    """What the block prints. `names` are the page's, as those of one program."""
    out = io.StringIO()
    code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
    with contextlib.redirect_stdout(out):
        exec(code, names)
    return out.getvalue()
