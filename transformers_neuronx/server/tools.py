"""Tools that a chat model may call: how its template writes calls, a grammar of them, and reading them from text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from secrets import token_hex
from typing import Any

from transformers_neuronx.server.errors import ApiError
from transformers_neuronx.server.fields import Chat, Function
from transformers_neuronx.serving.structured import StructuredOutputs, closed, json_rule
from transformers_neuronx.serving.text import begun

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


@dataclass
class Call:
    """A call of a tool; its arguments are JSON. The id is short, as Mistral's templates need it."""

    name: str
    arguments: str

    def __post_init__(self) -> None:
        self.id = token_hex(5)[:9]

    def told(self) -> dict[str, Any]:
        """Return the call as OpenAI's clients read it."""
        return dict(id=self.id, type="function", function=dict(name=self.name, arguments=self.arguments))


class CallReader:
    """Divides text, as it comes, into content and calls. What looks like a call and is none stays content."""

    def __init__(self, how: ToolFormat, names: Sequence[str]) -> None:
        self._how, self._names = how, names
        self._rest = ""
        self._inside = False  # whether the rest is a call, or its beginning
        self._began = False  # whether it is decided what the text begins with
        self._after = False  # whether a call was the last, so that space means nothing

    def add(self, text: str, ended: bool) -> tuple[str, list[Call]]:
        """Take more text. Return the content and the calls that are certain now."""
        self._rest += text
        content, calls = "", list[Call]()
        while self._rest:
            if not self._inside:
                more = self._content(ended)
                content += more.lstrip() if self._after else more
                self._after = self._after and not more.strip()
                if not self._inside:
                    break
            found = self._calls(ended)
            if found is None:
                break
            if not found:  # what began like a call was none
                content, self._rest = content + self._how.begin + self._rest, ""
                self._inside = False
            calls += found
            self._after = bool(found)
        return content.rstrip() if calls else content, calls

    def _content(self, ended: bool) -> str:
        """Take content off the rest, up to the beginning of a call."""
        how, rest = self._how, self._rest
        if not how.begin:
            return self._all_or_nothing(ended)
        place = rest.find(how.begin)
        if place >= 0:
            self._inside, self._rest = True, rest[place + len(how.begin) :]
            return rest[:place]
        kept = 0 if ended else begun(rest, how.begin)
        self._rest = rest[len(rest) - kept :]
        return rest[: len(rest) - kept]

    def _all_or_nothing(self, ended: bool) -> str:
        """Without a mark that begins a call, text is calls from its beginning on, or never."""
        start = self._rest.lstrip()
        bare = start.removeprefix(self._how.mark)
        undecided = not ended and (self._how.mark.startswith(start) or not bare)
        if not self._began and undecided:
            return ""
        if not self._began and bare.startswith("{"):
            self._began, self._inside, self._rest = True, True, bare
            return ""
        self._began = True
        content, self._rest = self._rest, ""
        return content

    def _calls(self, ended: bool) -> list[Call] | None:
        """Take calls off the rest. Return None if more text is needed, and [] if there are none."""
        how, start = self._how, self._rest.lstrip(None if self._how.begin else "; \n")
        if not start and not ended:
            return None
        try:
            value, place = json.JSONDecoder().raw_decode(start)
        except ValueError:
            malformed = ended or (how.end and how.end in start)
            return [] if malformed else None
        except RecursionError:  # no call is nested so deep
            return []
        after = start[place:].lstrip()
        if not ended and how.end and how.end.startswith(after) and after != how.end:
            return None
        calls = [self._call(each) for each in (value if isinstance(value, list) else [value])]
        if not calls or None in calls:
            return []
        whole = after.startswith(how.end) or not how.end.startswith(after)
        self._rest = after.removeprefix(how.end).lstrip() if whole else ""  # the rest of a mark that was cut off
        self._inside = not how.begin
        return [call for call in calls if call]

    def _call(self, value: Any) -> Call | None:
        if not isinstance(value, dict) or value.get("name") not in self._names:
            return None
        given = value.get("arguments", value.get("parameters", {}))
        return Call(value["name"], given if isinstance(given, str) else json.dumps(given, ensure_ascii=False))


@dataclass(frozen=True)
class Tools:
    """The tools that a request may call, or must. `several` says whether there may be more than one call, `named`
    whether the request names the tool, and `special` are the ids of special tokens.
    """

    functions: Sequence[Function]
    how: ToolFormat
    special: Mapping[str, int]
    several: bool = True
    must: bool = False
    named: bool = False

    def reader(self) -> CallReader:
        """Return a reader of the text of one sequence."""
        return CallReader(self.how, [function.name for function in self.functions])

    def outputs(self, text: StructuredOutputs | None) -> StructuredOutputs | None:
        """Return what an answer must be, which would be `text` without calls.

        Calls that are not strict, in text that may be any, are as the model writes them: no mask is needed. Where calls
        have no mark, an answer that must be JSON is never one.
        """
        grammar = partial(self.how.grammar, self.functions, self.special, self.several)
        if self.must:
            return StructuredOutputs(grammar=grammar())
        if text and self.how.begin and (schema := text.schema()) is not None:
            return StructuredOutputs(grammar=grammar(json_rule(schema)))
        if text is None and any(function.strict for function in self.functions):
            return StructuredOutputs(grammar=grammar(TEXT))
        return text


def tools_of(asked: Chat, template: str, special: Mapping[str, int]) -> Tools | None:
    """Return the tools that a request may call, or None. Raises ApiError for a choice that makes no sense.

    `special` are the ids of special tokens.
    """
    functions, choice, how = [tool.function for tool in asked.tools or ()], asked.tool_choice, format_of(template)
    if choice == "none" or not (functions or choice):
        return None
    if not functions:
        raise ApiError(400, "tool_choice needs tools", param="tool_choice")
    several = asked.parallel_tool_calls is not False
    if choice in (None, "auto"):
        return Tools(functions, how, special, several)
    if (asked.response_format and asked.response_format.type != "text") or asked.structured_outputs:
        raise ApiError(400, "with response_format, tool_choice must be none or auto", param="tool_choice")
    if choice == "required":
        return Tools(functions, how, special, several, must=True)
    wanted = [each for each in functions if each.name == _name(choice)][:1]
    if not wanted:
        names = ", ".join(function.name for function in functions)
        raise ApiError(400, f"tool_choice must be none, auto, required, or name one of {names}", param="tool_choice")
    return Tools(wanted, how, special, several=False, must=True, named=True)


def _name(choice: str | Mapping[str, Any]) -> Any:
    function = choice.get("function") if isinstance(choice, Mapping) else None
    return function.get("name") if isinstance(function, Mapping) else None
