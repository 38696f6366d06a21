"""Prompts in files: a JSON object on each line, or a list of objects. A bad one does not affect the others."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from transformers_neuronx.cli.text import encodable
from transformers_neuronx.errors import CheckpointError
from transformers_neuronx.support import files

Place = tuple[str, int]  # file and line

BLANK = b" \t\r\n"  # all white space of JSON
# Tokens that decide where an element of a list ends: a string, possibly unterminated, a bracket or a comma.
TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\Z)|[\[\]{},]', re.DOTALL)
KINDS = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}


@dataclass(frozen=True)
class Prompt:
    """The prompt of a line: its text, or what is wrong with it."""

    file: str
    line: int
    text: str = ""
    error: str | None = None

    @property
    def place(self) -> Place:
        return self.file, self.line


def read_prompts(path: str, output: str = "") -> Iterator[Prompt]:
    """Yield the prompts of a .json or .jsonl file, or of all such files in a folder, sorted by name.

    Every object has a "prompt". Any other line is reported as an error, and reading continues. The `output` of a run
    and its settings may be in the folder and are skipped.
    """
    found, made = Path(path).expanduser(), Path(output).expanduser()
    named = [found]
    if found.is_dir():
        own = {made.resolve(), settings_of(made).resolve()}
        named = sorted(file for file in found.glob("*.json*") if file.resolve() not in own)
    if not named:
        raise CheckpointError(f"{path}: expected .json or .jsonl files, found none")
    for file in named:
        files.want_file(file, "with prompts")
        for line, piece in _pieces(file):
            try:
                yield Prompt(file.name, line, _text(piece))
            except ValueError as error:
                yield Prompt(file.name, line, error=printable(str(error)))


def settings_of(output: Path) -> Path:
    """Return the path of the settings file of a run's results, next to them."""
    return output.parent / f"{output.name}.settings.json"


def _pieces(file: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the number and content of each line that is not blank, or of each element of a list.

    Only a line feed ends a line: U+2028 and the like may be part of a text.
    """
    if file.suffix == ".json":
        elements = _elements(file.read_bytes().removeprefix(codecs.BOM_UTF8).strip(BLANK))
        if elements is not None:
            yield from enumerate(elements, 1)
            return
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.removeprefix(codecs.BOM_UTF8).strip(BLANK):
                yield number, line.rstrip(BLANK)


def _elements(data: bytes) -> list[bytes] | None:
    """Return the elements of a list, or a single object; None if the data is lines instead."""
    if data[:1] not in (b"[", b"{"):
        return None
    depth, cuts, end = 0, [0], 0
    for token in TOKEN.finditer(data):
        if token[0] in (b"[", b"{"):
            depth += 1
        elif token[0] in (b"]", b"}"):
            depth -= 1
        elif token[0] == b"," and depth == 1:
            cuts.append(token.start())
        if depth == 0:
            end = token.end()
            break
    if end < len(data):
        return None
    if data[:1] == b"{":
        return [data]
    elements = [data[before + 1 : after].strip(BLANK) for before, after in pairwise([*cuts, len(data) - 1])]
    return [] if elements == [b""] else elements


def _text(piece: bytes) -> str:
    """Return the prompt of a piece of JSON. A ValueError says what is wrong with it."""
    try:
        found = json.loads(piece.decode("utf-8-sig"), object_pairs_hook=files.unique, parse_int=_whole)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error.reason} at byte {error.start + 1}") from error
    except json.JSONDecodeError as error:
        line = f" of its line {error.lineno}" if error.lineno > 1 else ""
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}{line}") from error
    except (RecursionError, MemoryError) as error:
        raise ValueError("too large or nested too deep to be read") from error
    if not isinstance(found, dict):
        raise ValueError(f'must be an object with a string as "prompt"; got {_kind(found)}')
    if "prompt" not in found:
        keys = f"the keys {', '.join(found)[:80]}" if found else "an empty one"
        raise ValueError(f'must be an object with a string as "prompt"; got {keys}')
    text = found["prompt"]
    if not isinstance(text, str):
        raise ValueError(f'"prompt" must be a string; got {_kind(text)}')
    return encodable(text, '"prompt"')


def _whole(digits: str) -> int:
    try:
        return int(digits)
    except ValueError:
        raise ValueError(f"a number of {len(digits)} digits is too long to be read") from None


def _kind(value: Any) -> str:
    return KINDS.get(type(value), "a number")


def printable(text: str) -> str:
    """Escape characters that cannot be printed or that control a terminal."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
