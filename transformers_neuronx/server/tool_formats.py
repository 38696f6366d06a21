"""How chat models write calls of tools, and a grammar of them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers_neuronx.server.fields import Function
from transformers_neuronx.serving.structured import closed, json_rule

TEXT = "TEXT"
ANY = r"/(.|\n)*/"


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes calls: `begin`, JSON with the name and the arguments, `end`.

    If they are `listed`, one list has all calls; otherwise each is between its own `begin` and `end`. `space` stands
    between these and the JSON. Without `begin`, the whole text must be calls, and `mark` may come before them.
    """

    begin: str
    end: str = ""
    key: str = "arguments"
    space: str = ""
    listed: bool = False
    mark: str = ""

    def grammar(self, tools: Sequence[Function], special: Mapping[str, int], several: bool, otherwise: str = "") -> str:
        """Return a grammar for text that is nothing but a call, or calls, of these tools, or is what `otherwise` says:
        another rule, or TEXT, in which calls stand among any other text.

        `special` are the ids of special tokens, which a grammar does not take for text.
        """
        more, next_call = ("*", '(", " call)*') if several else ("?", "")
        begin, space, end = (_terminal(value, special) for value in (self.begin, self.space, self.end))
        inner = f'"[" call {next_call} "]"' if self.listed else "call"
        rules = [
            f"body: {space} {inner} {space if self.end else ''} {end}",
            f"call: {' | '.join(f'tool_{number}' for number in range(len(tools)))}",
        ]
        for number, tool in enumerate(tools):
            head = json.dumps(f'{{"name": {json.dumps(tool.name)}, "{self.key}": ')
            schema = tool.parameters or dict(type="object", properties={}, additionalProperties=False)
            rules.append(f'tool_{number}: {head} {json_rule(closed(schema))} "}}"')
        again = f"({json.dumps(self.separator)} {begin} body)*" if several and not self.listed else ""
        calls = f"{begin} body {again}"
        if otherwise != TEXT:
            rules.append(f"start: {calls} {otherwise and '|'} {otherwise}")
        elif not self.begin:
            mark, begun = _terminal(self.mark, special), rf"\s*({re.escape(self.mark)})?\s*\{{"
            rules += [f"start: OTHER | {mark}? {calls}", f"OTHER: {ANY} & ~/{begun}(.|\\n)*/"]
        elif self.begin in special:
            rules += [f"start: (OTHER {begin} body){more} OTHER", f"OTHER: {ANY}"]
        else:
            rules += [f"start: (before body){more} OTHER", f"before[suffix={begin}]: {ANY}"]
            rules.append(rf"OTHER: {ANY} & ~/(.|\n)*{re.escape(self.begin)}(.|\n)*/")
        return "\n".join(rules)

    def written(self, *calls: Mapping[str, Any]) -> str:
        """Return calls as they stand in a text."""
        texts = [json.dumps(call) for call in calls]
        if self.listed:
            texts = [f"[{', '.join(texts)}]"]
        after = self.space if self.end else ""
        return self.separator.join(f"{self.begin}{self.space}{text}{after}{self.end}" for text in texts)

    @property
    def separator(self) -> str:
        """What stands between calls that are not in a list."""
        return "\n" if self.begin else "; "


def _terminal(value: str, special: Mapping[str, int]) -> str:
    """Return a text or a special token as it stands in a rule."""
    return f"<[{special[value]}]>" if value in special else json.dumps(value) if value else ""


# Of the supported families; the first one whose mark a template has. JSON without a mark is LLaMA's.
FORMATS = (
    ToolFormat("[TOOL_CALLS]", space=" ", listed=True),  # Mistral
    ToolFormat("<|tool_call|>", "<|/tool_call|>", listed=True),  # Phi
    ToolFormat("<tool_call>", "</tool_call>", space="\n"),  # Qwen, Hermes and many others
    ToolFormat("", key="parameters", mark="<|python_tag|>"),  # LLaMA
)
OTHERWISE = FORMATS[2]
TOLD = """You may call these functions to answer:
<tools>
{tools}
</tools>
To call one, write a JSON object with its name and its arguments, between tags:
{example}"""
EXAMPLE = dict(name="the function's name", arguments={"an argument's name": "its value"})


def knows_tools(template: str) -> bool:
    """Return whether a chat template has a place for tools."""
    return "tools" in template


def format_of(template: str) -> ToolFormat:
    """Return how a model with this chat template writes calls; as `told_as_text` says, if it knows no tools."""
    marked = (each for each in FORMATS if knows_tools(template) and (each.begin or each.mark) in template)
    return next(marked, OTHERWISE)


def told_as_text(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages for a template that knows no tools: tools, calls and results are parts of the text."""
    found = []
    for message in messages:
        told = {name: value for name, value in message.items() if name != "tool_calls"}
        for call in message.get("tool_calls") or ():
            called = {name: call["function"].get(name) for name in EXAMPLE}
            told["content"] += f"\n{OTHERWISE.written(called)}"
        if told["role"] == "tool":
            told = dict(role="user", content=f"<tool_response>\n{told['content']}\n</tool_response>")
        found.append(told | dict(content=told["content"].strip()))
    if not tools:
        return found
    listed = "\n".join(json.dumps(tool["function"]) for tool in tools)
    system = TOLD.format(tools=listed, example=OTHERWISE.written(EXAMPLE))
    if found[0]["role"] == "system":
        found[0]["content"] += f"\n\n{system}"
        return found
    return [dict(role="system", content=system), *found]
