"""A file of results, one line of JSON per prompt, that a run can continue after another one stopped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any, Self

import typer

from transformers_neuronx.cli.prompts import Prompt, settings_of
from transformers_neuronx.engine.descriptions import differences
from transformers_neuronx.errors import ConfigError, StorageError
from transformers_neuronx.support import files


class Results:
    """A .jsonl file of results, one line per prompt. Results in the file are on disk, and are not computed again.

    A `.settings.json` file next to it records its settings. Results of other settings are not added to it.
    """

    def __init__(self, path: Path, file: FileIO, settings: dict[str, Any], restart: bool) -> None:
        self.path = path
        self._file = file
        kept = settings_of(path)
        settings = json.loads(json.dumps(settings))
        empty = path.stat().st_size == 0
        if not empty and not kept.exists():
            raise ConfigError(f"{path} exists, but no run wrote it; choose another --output, or move the file")
        if restart or empty:
            file.truncate(0)
            files.save(kept, json.dumps(settings, indent=2).encode(), "the settings of the results")
        elif found := differences(files.read_json(kept), settings):
            raise ConfigError(f"{path} was made with other settings: {'; '.join(found)}. --restart starts over")
        self.done = {(record["file"], record["line"]): record for record in self._read()}

    @classmethod
    @contextmanager
    def at(cls, path: str, settings: dict[str, Any], restart: bool) -> Iterator[Self]:
        """Open the results in a file and lock it. Raises StorageError if another run is writing to it."""
        place = files.want_writable(Path(path).expanduser())
        if place.exists() and not place.is_file():
            raise ConfigError(f"{path}: results must go to a regular file, found {files.kind(place)}")
        with files.saving(place, "results"):
            place.parent.mkdir(parents=True, exist_ok=True)
            file = open(place, "ab", buffering=0)  # noqa: SIM115 - closed at the end
        with file:
            _lock(file, path)
            yield cls(place, file, settings, restart)

    def _read(self) -> Iterator[dict[str, Any]]:
        """Yield the complete lines, and cut off a partial one that a killed run left."""
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            self._file.truncate(whole)
        for number, line in enumerate(data[:whole].splitlines(), 1):
            with files.explain(f"{self.path}, line {number}: not a result", "--restart starts over"):
                record = json.loads(line)
                record["file"], record["line"]
            yield record

    def check(self, prompt: Prompt) -> None:
        """Raise ConfigError if this place has the result of another prompt."""
        record = self.done.get(prompt.place)
        text = None if prompt.error is not None else prompt.text
        if record is not None and record.get("prompt") != text:
            place = f"{prompt.file}, line {prompt.line}"
            raise ConfigError(f"{self.path} has a result for another prompt in {place}. --restart starts over")

    def add(self, record: dict[str, Any]) -> None:
        """Write a result that is not in the file yet."""
        with files.saving(self.path, "results"):
            files.append(self._file, _line(record))
        self.done[record["file"], record["line"]] = record


def _lock(file: FileIO, path: str) -> None:
    try:
        files.lock(file)
    except BlockingIOError as error:
        raise StorageError(
            f"{path}: another run is writing results there; wait for it, or choose another --output"
        ) from error
    except OSError as error:
        typer.echo(f"{path} cannot be locked ({error.strerror}): do not let another run write to it", err=True)


def _line(record: dict[str, Any]) -> bytes:
    """Encode a record as a line of UTF-8, with JSON escapes for lone surrogates, as a file name may have."""
    return json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
