"""Calls of tools, read from text as it comes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from secrets import token_hex
from typing import Any

from transformers_neuronx.server.tool_formats import ToolFormat
from transformers_neuronx.serving.text import begun


@dataclass
class Call:
    """A call of a tool; its arguments are JSON. The id is short, as Mistral's templates need it."""

    name: str
    arguments: str = ""

    def __post_init__(self) -> None:
        self.id = token_hex(5)[:9]

    def told(self) -> dict[str, Any]:
        """Return the call as OpenAI's clients read it."""
        return dict(id=self.id, type="function", function=dict(name=self.name, arguments=self.arguments))


@dataclass
class CallPart:
    """What is new of a call: more of its arguments. The first part has its name too."""

    index: int
    call: Call
    arguments: str
    first: bool

    def told(self) -> dict[str, Any]:
        """Return the part as OpenAI's clients read it from a stream."""
        new = dict(arguments=self.arguments)
        if not self.first:
            return dict(index=self.index, function=new)
        return dict(index=self.index) | self.call.told() | dict(function=dict(name=self.call.name) | new)


# A call up to its arguments, alone or as the first of a list.
HEAD = re.compile(r'\s*(\[)?\s*\{\s*"name"\s*:\s*"([\w.-]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
decoded = json.JSONDecoder(strict=False).raw_decode


class CallReader:
    """Divides text, as it comes, into content and `calls`. What looks like a call and is none stays content.

    A call is one as soon as its name is there, before its arguments. They are told as they come.
    """

    def __init__(self, how: ToolFormat, names: Sequence[str]) -> None:
        self._how, self._names = how, names
        self.calls: list[Call] = []
        # What reads the rest now. It returns whether what is left can be read on.
        self._read: Callable[[], bool] = self._read_text
        self._rest, self._ended = "", False
        self._content, self._parts = "", list[CallPart]()
        self._began = False  # whether it is decided what the text begins with
        self._after = False  # whether a call was the last, so that space means nothing
        self._listed = False  # whether the call is in a list

    def add(self, text: str, ended: bool) -> tuple[str, list[CallPart]]:
        """Take more text. Return the content and the parts of calls that are certain now."""
        self._rest, self._ended, self._content, self._parts = self._rest + text, ended, "", []
        while self._rest and self._read():
            pass
        return self._content.rstrip() if self._parts else self._content, self._parts

    def _tell(self, content: str) -> None:
        self._content += content.lstrip() if self._after else content
        self._after = self._after and not content.strip()

    def _read_text(self) -> bool:
        """Read content, up to the beginning of a call."""
        how, rest = self._how, self._rest
        if not how.begin:
            return self._read_all_or_nothing()
        place = rest.find(how.begin)
        if place >= 0:
            self._tell(rest[:place])
            self._read, self._rest = self._read_call, rest[place + len(how.begin) :]
            return True
        kept = 0 if self._ended else begun(rest, how.begin)
        self._tell(rest[: len(rest) - kept])
        self._rest = rest[len(rest) - kept :]
        return False

    def _read_all_or_nothing(self) -> bool:
        """Without a mark that begins a call, text is calls from its beginning on, or never."""
        start = self._rest.lstrip()
        bare = start.removeprefix(self._how.mark)
        undecided = not self._ended and (self._how.mark.startswith(start) or not bare)
        if not self._began and undecided:
            return False
        if not self._began and bare.startswith("{"):
            self._began, self._read, self._rest = True, self._read_call, bare
            return True
        self._began = True
        self._tell(self._rest)
        self._rest = ""
        return False

    def _read_call(self) -> bool:
        """Read a call up to its arguments; or a whole one, if it is written in another way."""
        how, start = self._how, self._rest.lstrip(None if self._how.begin else "; \n")
        head = HEAD.match(start)
        if head and head[2] in self._names:
            self._listed = bool(head[1])
            self._open(Call(head[2]))
            self._read, self._rest = self._read_arguments, start[head.end() :]
            return True
        if not start and not self._ended:
            return False
        try:
            value, place = decoded(start)
        except (ValueError, RecursionError) as error:  # no call is nested so deep
            may_be_one = isinstance(error, ValueError) and not self._ended and not (how.end and how.end in start)
            return not may_be_one and self._no_call()
        values = value if isinstance(value, list) else [value]
        calls = [call for each in values if (call := self._call(each))]
        if not calls or len(calls) < len(values):
            return self._no_call()
        for call in calls:
            self._open(call)
        self._read, self._rest = self._read_end, start[place:]
        return True

    def _no_call(self) -> bool:
        """Take for content what began like a call."""
        self._tell(self._how.begin)
        self._read = self._read_text
        return True

    def _call(self, value: Any) -> Call | None:
        if not isinstance(value, dict) or value.get("name") not in self._names:
            return None
        given = value.get("arguments", value.get("parameters", {}))
        return Call(value["name"], given if isinstance(given, str) else json.dumps(given, ensure_ascii=False))

    def _open(self, call: Call) -> None:
        self._parts.append(CallPart(len(self.calls), call, call.arguments, True))
        self.calls.append(call)

    def _read_arguments(self) -> bool:
        """Read as much of a call's arguments as there is. Until they are complete, the rest begins with all of them."""
        call, complete, place = self.calls[-1], True, len(self._rest)
        try:
            place = decoded(self._rest)[1]
        except (ValueError, RecursionError):
            complete = False
        new = self._rest[len(call.arguments) : place]
        call.arguments += new
        if self._parts and self._parts[-1].call is call:
            self._parts[-1].arguments += new
        elif new:
            self._parts.append(CallPart(len(self.calls) - 1, call, new, False))
        if complete:
            self._read, self._rest = self._read_next, self._rest[place:]
        return complete

    def _read_next(self) -> bool:
        """Read what follows the arguments of a call: it ends, and maybe its list, or the list goes on."""
        rest = self._rest.lstrip()
        after = rest.removeprefix("}").lstrip()
        if not self._ended and not (after if self._listed else rest):
            return False
        if self._listed and after.startswith(","):
            self._read, self._rest = self._read_call, f"[{after[1:]}"
        else:
            self._read, self._rest = self._read_end, after.removeprefix("]") if self._listed else after
        return True

    def _read_end(self) -> bool:
        """Read the mark that ends a call."""
        end, rest = self._how.end, self._rest.lstrip()
        if not self._ended and end.startswith(rest) and rest != end:
            return False
        whole = rest.startswith(end) or not end.startswith(rest)
        self._rest = rest.removeprefix(end).lstrip() if whole else ""  # the rest of a mark that was cut off
        self._after, self._read = True, self._read_text if self._how.begin else self._read_call
        return True
