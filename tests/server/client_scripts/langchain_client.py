"""What LangChain has of a server at an address: `langchain_client.py URL PROMPT OTHER_PROMPT`, printed as JSON."""

import asyncio
import json
import sys
from functools import reduce
from operator import add
from typing import Literal

import openai
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

# Fields are bounded and no others are allowed: a model that is not trained for JSON would go on and on.


class Town(BaseModel, extra="forbid"):
    """A town of Judah."""

    name: str = Field(max_length=8)
    kind: Literal["city", "village"]
    gates: int = Field(ge=1, le=9)


class Weather(BaseModel, extra="forbid"):
    """The weather of the next days."""

    city: str = Field(max_length=8)
    days: int = Field(ge=1, le=9)


def chats(chat, prompts):
    """Answers of a chat: whole, as a stream, several at once, and with log-probabilities."""
    answer = chat.invoke(prompts[0])
    parts = [*chat.stream(prompts[0], stream_usage=True)]
    scored = chat.bind(logprobs=True, top_logprobs=2).invoke(prompts[0]).response_metadata["logprobs"]["content"]
    return dict(
        answer=answer.content,
        reason=answer.response_metadata["finish_reason"],
        tokens=used(answer),
        stream="".join(part.content for part in parts),
        stream_tokens=used(reduce(add, parts)),
        async_answer=asyncio.run(chat.ainvoke(prompts[0])).content,
        batch=[each.content for each in chat.batch(prompts)],
        scored=[(each["token"], each["logprob"], len(each["top_logprobs"])) for each in scored],
    )


def used(answer):
    """Return the numbers of tokens."""
    return [answer.usage_metadata["input_tokens"], answer.usage_metadata["output_tokens"]]


def towns(chat, prompt):
    """An object of a schema, in both of LangChain's ways."""
    methods = ("json_schema", "function_calling")
    return {method: chat.with_structured_output(Town, method=method).invoke(prompt).model_dump() for method in methods}


def calls(chat, prompt):
    """Calls of a tool that must be called, whole and as a stream, and the answer after the tool's result."""
    found = {}
    for choice in ("Weather", "any"):
        bound = chat.bind_tools([Weather], tool_choice=choice, parallel_tool_calls=False)
        answer = bound.invoke(prompt)
        streamed = reduce(add, bound.stream(prompt))
        results = [ToolMessage("rain", tool_call_id=call["id"]) for call in answer.tool_calls]
        after = chat.bind_tools([Weather]).invoke([HumanMessage(prompt), answer, *results], max_tokens=8)
        found[choice] = dict(
            called=[(call["name"], call["args"]) for call in answer.tool_calls],
            streamed=[(call["name"], call["args"]) for call in streamed.tool_calls],
            reason=answer.response_metadata["finish_reason"],
            after=after.content,
        )
    return found


def texts(model, prompts):
    """Completions: whole, as a stream, several at once."""
    return dict(one=model.invoke(prompts[0]), stream="".join(model.stream(prompts[0])), both=model.batch(prompts))


def errors(options):
    """The classes of the errors of requests that are wrong."""
    found = {}
    for name, fields, prompt in (("model", dict(model="other"), "a"), ("prompt", {}, "And it came to pass " * 200)):
        try:
            ChatOpenAI(**options | fields).invoke(prompt)
        except openai.APIStatusError as error:
            found[name] = [each.__name__ for each in type(error).__mro__]
    return found


url, *prompts = sys.argv[1:]
options = dict(model="tiny-kjv", base_url=f"{url}/v1", api_key="none", temperature=0)
few, many = ChatOpenAI(max_tokens=12, **options), ChatOpenAI(max_tokens=150, **options)
print(json.dumps(dict(
    chats=chats(few, prompts),
    towns=towns(many, prompts[0]),
    calls=calls(many, prompts[0]),
    texts=texts(OpenAI(max_tokens=12, **options), prompts),
    errors=errors(options),
)))  # fmt: skip
