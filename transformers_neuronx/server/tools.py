"""Tools that a chat model may call, or must."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers_neuronx.server.calls import CallReader
from transformers_neuronx.server.errors import ApiError
from transformers_neuronx.server.fields import Chat, Function
from transformers_neuronx.server.tool_formats import TEXT, ToolFormat, format_of
from transformers_neuronx.serving.structured import StructuredOutputs, json_rule


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
