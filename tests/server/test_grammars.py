"""JSON by a schema, other texts by a grammar, and calls of tools, as OpenAI's client asks for them."""

import copy
import json
from collections import Counter
from dataclasses import replace
from typing import Literal

import numpy as np
import openai
import pytest
from pydantic import BaseModel, Field

from transformers_neuronx.server.calls import CallReader
from transformers_neuronx.server.fields import Chat, Function, fields_of
from transformers_neuronx.server.prompts import Prompts
from transformers_neuronx.server.tool_formats import FORMATS, format_of
from transformers_neuronx.server.tools import Tools
from transformers_neuronx.serving.structured import Grammars, StructuredOutputs

MESSAGES = [dict(role="user", content="In what city was David born?")]
HOW = dict(model="tiny-kjv", max_completion_tokens=150, messages=MESSAGES)
CITY = dict(type="string", maxLength=12)
DAYS = dict(type="integer", minimum=1, maximum=9)
WEATHER = dict(type="object", properties=dict(city=CITY, days=DAYS), required=["city", "days"])
WEATHER["additionalProperties"] = False


def tool(name, parameters=None):
    function = dict(name=name, description=f"The {name}")
    return dict(type="function", function=function | (dict(parameters=parameters) if parameters else {}))


TOOLS = [tool("weather", WEATHER), tool("now")]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ur", "days": 2}}\n</tool_call>'


class Town(BaseModel):
    name: str = Field(max_length=12)
    kind: Literal["city", "village"]
    gates: int = Field(ge=1, le=12)


def test_parse_gives_objects(client):
    answer = client.chat.completions.parse(response_format=Town, temperature=0, **HOW)
    town = answer.choices[0].message.parsed
    assert isinstance(town, Town) and answer.choices[0].finish_reason == "stop"
    assert Town.model_validate_json(answer.choices[0].message.content) == town


def test_streams_are_the_same_json(client):
    with client.chat.completions.stream(response_format=Town, temperature=0, **HOW) as stream:
        told = [event for event in stream if event.type == "content.delta"]
        town = stream.get_final_completion().choices[0].message.parsed
    whole = client.chat.completions.parse(response_format=Town, temperature=0, **HOW)
    assert len(told) > 5 and town == whole.choices[0].message.parsed


def test_any_object(client):
    answer = client.chat.completions.create(
        response_format=dict(type="json_object"), n=8, seed=2, **HOW | dict(max_completion_tokens=60)
    )
    ended = [choice for choice in answer.choices if choice.finish_reason == "stop"]
    assert ended and all(isinstance(json.loads(choice.message.content), dict) for choice in ended)


@pytest.mark.parametrize("stream", [False, True])
def test_completions_follow_grammars_too(client, stream):
    outputs = dict(structured_outputs=dict(choice=["behold", "verily"]))
    answer = client.completions.create(
        model="tiny-kjv", prompt="And he said,", n=6, seed=0, stream=stream, extra_body=outputs
    )
    texts = [""] * 6
    for event in answer if stream else [answer]:
        for choice in event.choices:
            texts[choice.index] += choice.text
    assert set(texts) <= {"behold", "verily"}


REFUSED = {
    "a wrong type": (dict(response_format=dict(type="xml")), "response_format", "response_format.type: Invalid enum"),
    "no schema": (dict(response_format=dict(type="json_schema")), "response_format", "must have a json_schema"),
    "a wrong schema": (
        dict(response_format=dict(type="json_schema", json_schema=dict(name="a", schema=dict(type="strin")))),
        "response_format",
        "the grammar cannot be followed: Invalid type: strin",
    ),
    "none of them": (dict(extra_body=dict(structured_outputs={})), "structured_outputs", "must have one of json"),
    "both": (
        dict(response_format=dict(type="json_object"), extra_body=dict(structured_outputs=dict(regex="a"))),
        "response_format",
        "cannot both be given",
    ),
    "no tools": (dict(tool_choice="required"), "tool_choice", "tool_choice needs tools"),
    "another tool": (
        dict(tools=TOOLS, tool_choice=dict(type="function", function=dict(name="other"))),
        "tool_choice",
        "must be none, auto, required, or name one of weather, now",
    ),
    "a tool without a name": (dict(tools=[dict(type="function", function={})]), "tools", "missing required field"),
    "a tool's schema": (
        dict(tools=[tool("a", dict(type="strin"))], tool_choice="required"),
        "tools",
        "the grammar cannot be followed",
    ),
    "a call and a schema": (
        dict(tools=TOOLS, tool_choice="required", response_format=dict(type="json_object")),
        "tool_choice",
        "tool_choice must be none or auto",
    ),
    "calls that are no JSON": (
        dict(messages=[dict(role="assistant", tool_calls=[dict(function=dict(name="a", arguments="{"))])]),
        "messages[0]",
        "tool_calls must be functions whose arguments are JSON",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_followed(client, name):
    fields, param, message = REFUSED[name]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**HOW | fields)
    assert message in caught.value.message and caught.value.param == param


def test_a_tool_that_must_be_called(client):
    answer = client.chat.completions.create(
        tools=TOOLS, tool_choice="required", parallel_tool_calls=False, n=4, seed=4, **HOW
    )
    ended = [choice for choice in answer.choices if choice.finish_reason != "length"]
    for choice in ended:
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        [call] = choice.message.tool_calls
        assert call.function.name in ("weather", "now") and isinstance(json.loads(call.function.arguments), dict)
    assert ended


@pytest.mark.parametrize("stream", [False, True])
def test_a_named_tool(client, stream):
    how = HOW | dict(tools=TOOLS, tool_choice=dict(type="function", function=dict(name="weather")), seed=1)
    if stream:
        with client.chat.completions.stream(**how) as events:
            answer = events.get_final_completion()
    else:
        answer = client.chat.completions.create(**how)
    [call] = answer.choices[0].message.tool_calls
    assert call.function.name == "weather" and answer.choices[0].finish_reason == "stop"
    given = json.loads(call.function.arguments)
    assert len(given["city"]) <= 12 and 1 <= given["days"] <= 9


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_that_may_be_called(client, stream):
    """The model is made to write a call after some text."""
    text = dict(structured_outputs=dict(choice=[f"Let me see. {CALL}\n{CALL}"]))
    answer = client.chat.completions.create(
        tools=TOOLS, stream=stream, extra_body=text, **HOW | dict(max_completion_tokens=190)
    )
    content, calls, reasons, pieces = "", {}, [], 0
    for event in answer if stream else [answer]:
        part = event.choices[0].delta if stream else event.choices[0].message
        content += part.content or ""
        for place, call in enumerate(part.tool_calls or ()):
            if not stream or call.id:
                calls[call.index if stream else place] = call
            else:
                calls[call.index].function.arguments += call.function.arguments
                pieces += 1
        reasons.append(event.choices[0].finish_reason)
    assert content.strip() == "Let me see." and reasons[-1] == "tool_calls"
    assert len(calls) == 2 and calls[0].id != calls[1].id
    assert all(json.loads(call.function.arguments) == dict(city="Ur", days=2) for call in calls.values())
    assert (pieces > 5) == stream


def test_strict_tools_leave_other_text_as_it_is(client):
    how = dict(temperature=0, **HOW | dict(max_completion_tokens=20))
    texts = []
    for strict in (False, True):
        tools = [tool("weather", WEATHER)]
        tools[0]["function"]["strict"] = strict
        texts.append(client.chat.completions.create(tools=tools, **how).choices[0].message.content)
    assert texts[0] == texts[1] and texts[0]


def test_json_or_a_call(client):
    """An answer that must be JSON may be a call in its place."""
    tools = [openai.pydantic_function_tool(Town, name="found")]
    found = Counter()
    for seed in range(8):
        try:
            answer = client.chat.completions.parse(response_format=Town, tools=tools, seed=seed, **HOW)
        except openai.LengthFinishReasonError:
            continue
        message = answer.choices[0].message
        town = message.tool_calls[0].function.parsed_arguments if message.tool_calls else message.parsed
        assert isinstance(town, Town)
        found[answer.choices[0].finish_reason] += 1
    assert found["stop"] and found.keys() <= {"stop", "tool_calls"}


@pytest.mark.parametrize("how", FORMATS)
@pytest.mark.parametrize("special", [False, True])
def test_grammars_of_calls(tokenizer, how, special):
    own = copy.deepcopy(tokenizer)
    if special:
        marks = [mark for mark in (how.begin, how.end, how.mark) if mark]
        own.add_special_tokens(dict(additional_special_tokens=marks))
    call = {"name": "weather", how.key: dict(city="Ur", days=2)}
    other = how.written(call | {how.key: dict(city="Ur", town=2)})
    whole, two = how.written(call), how.written(call, call)

    def checked(tools, text, ends, begun, wrong):
        outputs = tools.outputs(text)
        for found, texts in (("ends", ends), ("goes on", begun), ("is wrong", wrong)):
            assert [taken(own, outputs, each) for each in texts] == [found] * len(texts), texts

    functions = [Function("now"), Function("weather", parameters=WEATHER, strict=True)]
    tools = Tools(functions, how, Prompts(own).special)
    before = f"Let me see. {whole}"
    free, never = ([before, f"{before} Done", "[1"], []) if how.begin else (["Let me see", "[1"], [f"\n{whole}"])
    checked(tools, None, ["", "hello <t", whole, two, *free], [whole[: whole.index('"Ur') + 3]], [other, *never])
    checked(replace(tools, several=False), None, [whole], [], [two])
    checked(replace(tools, must=True), None, [whole, two], [""], ["hello", other, f"{whole} Done"])
    json_text = StructuredOutputs(json=dict(DAYS))
    if how.begin:
        checked(tools, json_text, ["7", whole, two], [""], ["hello", before, other])
    else:
        assert tools.outputs(json_text) == json_text
    assert replace(tools, functions=functions[:1]).outputs(None) is None, "it is not strict"


def taken(tokenizer, outputs, text):
    """Return whether a grammar lets a text come, and whether it may end there."""
    end = tokenizer.eos_token_id
    grammars = Grammars(tokenizer, len(tokenizer), {end})
    [parser] = grammars.parsers(outputs, 1)
    allowed = np.zeros((len(tokenizer) + 31) // 32, np.int32)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    for place, token in enumerate([*ids, end]):
        parser.fill(allowed, [])
        if not allowed[token // 32] >> token % 32 & 1:
            return "goes on" if place == len(ids) else "is wrong"
        if place < len(ids) and parser.add(token):
            return "ends" if place == len(ids) - 1 else "is wrong"
    return "ends"


def test_a_template_that_knows_no_tools(tokenizer):
    """Tools, calls and what they answered are told as text."""
    plain = copy.copy(tokenizer)
    plain.chat_template = "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
    call = dict(id="abc", type="function", function=dict(name="weather", arguments='{"city": "Ur"}'))
    messages = [*MESSAGES, dict(role="assistant", content=None, tool_calls=[call])]
    messages.append(dict(role="tool", tool_call_id="abc", content="It is sunny"))
    asked = fields_of(Chat, json.dumps(dict(messages=messages, tools=TOOLS[1:])).encode())
    text = tokenizer.decode(Prompts(plain).of_chat(asked, tools=True)[0])
    assert text.startswith("[system] You may call") and '{"name": "now", "description": "The now"}' in text
    assert '[assistant] <tool_call>\n{"name": "weather", "arguments": {"city": "Ur"}}\n</tool_call>\n' in text
    assert text.endswith("[user] <tool_response>\nIt is sunny\n</tool_response>\n[assistant] ") or text.endswith(
        "[user] <tool_response>\nIt is sunny\n</tool_response>\n"
    )


TEXTS = {
    "[TOOL_CALLS]": '[TOOL_CALLS] [{"name": "now", "arguments": {}}, {"name": "weather", "arguments": {"city": "Ur"}}]',
    "<|tool_call|>": '<|tool_call|>[{"name": "now", "arguments": {}}, {"name": "weather", "arguments": {"city": "Ur"}}]'
    "<|/tool_call|>",
    "<tool_call>": '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n'
    '<tool_call>{"name": "weather", "arguments": {"city": "Ur"}}</tool_call>',
    "<|python_tag|>": '<|python_tag|>{"name": "now", "parameters": {}}; '
    '{"name": "weather", "parameters": {"city": "Ur"}}',
    "": '<tool_call>{"name": "now"}</tool_call><tool_call>{"name": "weather", "arguments": {"city": "Ur"}}</tool_call>',
}


def read(how, text, size):
    """Read a text in pieces of this size. Return its content, and the name and arguments of each call."""
    reader, content, calls = CallReader(how, ["now", "weather"]), "", []
    for start in range(0, len(text) + size, size):
        more, parts = reader.add(text[start : start + size], start >= len(text))
        content += more
        for part in parts:
            assert part.first == (part.index == len(calls)), "the first part of a call comes once"
            if part.first:
                calls.append([part.call.name, ""])
            calls[part.index][1] += part.arguments
    assert [(call.name, call.arguments) for call in reader.calls] == [tuple(call) for call in calls]
    return content, [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("mark", TEXTS)
@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_calls_in_the_formats_of_models(mark, size):
    how = format_of(f"{{% if tools %}}{mark}{{% endif %}}")
    calls = [("now", {}), ("weather", dict(city="Ur"))]
    assert read(how, TEXTS[mark], size) == ("", calls)
    if how.begin:
        content, found = read(how, f"I see. {TEXTS[mark]} Done.", size)
        assert (content.replace(" ", ""), found) == ("Isee.Done.", calls)


@pytest.mark.parametrize("how", FORMATS)
@pytest.mark.parametrize("size", [1, 4, 1000])
def test_what_is_no_call_stays_text(how, size):
    texts = [
        "Hello",
        "a [TOOL and a <tool_cal",
        '{"name": "other"}',
        "{not JSON",
        f"{how.begin}oh",
        "[1]",
        "<|py",
        "",
        how.begin + "[]",
        how.begin + "[" * 3000,
    ]
    for text in texts:
        assert read(how, text, size) == (text, [])


@pytest.mark.parametrize("how", FORMATS)
def test_arguments_are_told_as_they_come(how):
    call = {"name": "weather", how.key: dict(city="Ur of the Chaldees", text='\\"}]</tool_call>\n' * 3)}
    reader, text = CallReader(how, ["weather"]), how.written(call)
    told = [
        part.arguments for place, letter in enumerate(text) for part in reader.add(letter, place + 1 == len(text))[1]
    ]
    assert len(told) > 60 and max(map(len, told)) == 1
    assert json.loads("".join(told)) == call[how.key] and len(reader.calls) == 1


def test_arguments_that_are_cut_off_or_wrong_are_told_as_they_are():
    how, begin = FORMATS[2], '<tool_call>{"name": "weather", "arguments": '
    for given in ('{"city": "U', '{"city": Ur}', "{" * 3000):
        for size in (1, 1000):
            reader = CallReader(how, ["weather"])
            for start in range(0, len(begin + given), size):
                reader.add((begin + given)[start : start + size], False)
            assert reader.add("", True) == ("", []) and reader.calls[0].arguments == given


def test_a_mark_that_is_cut_off_is_no_text():
    how = format_of("<tool_call>")
    for size in (1, 1000):
        text = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_'
        assert read(how, text, size) == ("", [("now", {})])


def test_the_template_for_tools_says_how_calls_look(tokenizer):
    named = copy.copy(tokenizer)
    named.chat_template = dict(default="{{ messages }}", tool_use="{% if tools %}[TOOL_CALLS]{% endif %}{{ messages }}")
    assert format_of(Prompts(named).template(tools=True)).begin == "[TOOL_CALLS]"
    assert format_of(Prompts(named).template()).begin == "<tool_call>"
    assert format_of("<|python_tag|> in a template that knows none").begin == "<tool_call>"
