"""Prompts in files, and what is made of them in a file of results that a run goes on with where another stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers_neuronx import files
from transformers_neuronx.errors import CheckpointError, ConfigError
from transformers_neuronx.serialization import differences

Place = tuple[str, int]  # file and line


@dataclass(frozen=True)
class Prompt:
    """What stands in a line: its text, or what is wrong with it."""

    file: str
    line: int
    text: str = ""
    error: str | None = None

    @property
    def place(self) -> Place:
        return self.file, self.line


def read_prompts(path: str) -> Iterator[Prompt]:
    """The prompts of a .json or .jsonl file, or of all such files in a folder, in the order of their names.

    Every object has a "prompt". A line with anything else is reported as that, and the others are read.
    """
    found = Path(path).expanduser()
    named = sorted(found.glob("*.json*")) if found.is_dir() else [found]
    if not named:
        raise CheckpointError(f"{path}: wanted .json or .jsonl files, found none")
    for file in named:
        files.want_file(file, "of prompts")
        with files.explain(f"{file}: cannot be read", "wanted JSON in UTF-8"):
            text = file.read_text(encoding="utf-8")
        yield from (_prompt(file.name, line, found) for line, found in _objects(file, text))


def _objects(file: Path, text: str) -> Iterator[tuple[int, Any]]:
    """Each object and its line; of a list in one piece, its number. An error where there is none."""
    if file.suffix == ".json":
        try:
            whole = json.loads(text)
        except json.JSONDecodeError:
            pass  # lines, then
        else:
            yield from enumerate(whole if isinstance(whole, list) else [whole], 1)
            return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except json.JSONDecodeError as error:
                yield number, error


def _prompt(file: str, line: int, found: Any) -> Prompt:
    if isinstance(found, json.JSONDecodeError):
        return Prompt(file, line, error=f"not JSON: {found.msg} at column {found.colno}")
    if not isinstance(found, dict) or not isinstance(found.get("prompt"), str):
        kind = f"one of {', '.join(found)}" if isinstance(found, dict) else type(found).__name__
        return Prompt(file, line, error=f'wanted an object with "prompt", a text; got {kind[:80]}')
    return Prompt(file, line, found["prompt"])


class Results:
    """A .jsonl file of results, one line for each prompt. What is in it is on the disk, and is not made again.

    Beside it, in `.settings.json`, stands what it was made with: results of other settings are not added to it.
    """

    def __init__(self, path: str, settings: dict[str, Any], restart: bool) -> None:
        self.path = Path(path).expanduser()
        self._settings = self.path.with_name(self.path.name + ".settings.json")
        settings = json.loads(json.dumps(settings))
        files.want_writable(self.path)
        if self.path.exists() and not self._settings.exists():
            raise ConfigError(f"{path} is there, and no run has made it; choose another --output, or move it away")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if restart or not self.path.exists():
            self.path.unlink(missing_ok=True)
            files.replace(self._settings, json.dumps(settings, indent=2).encode())
        elif found := differences(files.read_json(self._settings), settings):
            raise ConfigError(f"{path} was made with other settings: {'; '.join(found)}. --restart begins anew")
        self.done = {(record["file"], record["line"]): record for record in self._read()}
        self._file = open(self.path, "ab")  # noqa: SIM115 - closed by close()

    def _read(self) -> Iterator[dict[str, Any]]:
        """The lines that are whole; what a killed run has left of another is cut off."""
        data = self.path.read_bytes() if self.path.exists() else b""
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.truncate(self.path, whole)
        for number, line in enumerate(data[:whole].splitlines(), 1):
            with files.explain(f"{self.path}, line {number}: not a result", "--restart begins anew"):
                record = json.loads(line)
                record["file"], record["line"]
            yield record

    def check(self, prompt: Prompt) -> None:
        """Raise ConfigError if there is a result for another prompt in this place."""
        record = self.done.get(prompt.place)
        if record is not None and "prompt" in record and record["prompt"] != prompt.text:
            place = f"{prompt.file}, line {prompt.line}"
            raise ConfigError(f"{self.path} has a result for another prompt in {place}. --restart begins anew")

    def add(self, records: list[dict[str, Any]]) -> None:
        """Write results that are not there yet."""
        new = [record for record in records if (record["file"], record["line"]) not in self.done]
        self._file.write(b"".join(json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in new))
        self._file.flush()
        os.fsync(self._file.fileno())
        self.done |= {(record["file"], record["line"]): record for record in new}

    def close(self) -> None:
        self._file.close()
