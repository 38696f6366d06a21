"""A file of results, a line of JSON for each prompt, that a run goes on with where another stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers_neuronx import files
from transformers_neuronx.cli.prompts import Prompt
from transformers_neuronx.errors import ConfigError
from transformers_neuronx.serialization import differences


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
            files.save(self._settings, json.dumps(settings, indent=2).encode(), "the settings of the results")
        elif found := differences(files.read_json(self._settings), settings):
            raise ConfigError(f"{path} was made with other settings: {'; '.join(found)}. --restart begins anew")
        self.done = {(record["file"], record["line"]): record for record in self._read()}
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - closed by close()

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
        text = None if prompt.error is not None else prompt.text
        if record is not None and record.get("prompt") != text:
            place = f"{prompt.file}, line {prompt.line}"
            raise ConfigError(f"{self.path} has a result for another prompt in {place}. --restart begins anew")

    def add(self, records: list[dict[str, Any]]) -> None:
        """Write results that are not there yet."""
        new = [record for record in records if (record["file"], record["line"]) not in self.done]
        with files.saving(self.path, "results"):
            files.append(self._file, b"".join(_line(record) for record in new))
        self.done |= {(record["file"], record["line"]): record for record in new}

    def close(self) -> None:
        self._file.close()


def _line(record: dict[str, Any]) -> bytes:
    """In UTF-8. What that lacks, as half of a surrogate in the name of a file, has the escape that JSON has for it."""
    return json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
