"""A trained chat model over HTTP: a long conversation, JSON, a tool, and many users at once."""

from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import pytest
import torch
from by_keys import ask, set_option
from openai import OpenAI
from pydantic import BaseModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from transformers_neuronx import Engine
from transformers_neuronx.huggingface.auto import NeuronAutoModelForCausalLM
from transformers_neuronx.server.app import Server
from transformers_neuronx.server.models import ServedModel
from transformers_neuronx.server.settings import Settings
from transformers_neuronx.serving.pages import PAGE

pytestmark = pytest.mark.slow

NAME, NEW = "smollm2", 24
HOW = dict(model=NAME, temperature=0, max_tokens=NEW)
QUESTIONS = [
    "What is the capital of France?",
    "And of Italy?",
    "Which of the two is older?",
    "Name one river in each of them.",
    "What do people eat there?",
    "Give me a recipe of one line.",
    "How long does it take to cook?",
    "Which wine goes with it?",
    "Say thank you in French.",
    "And in Italian?",
]


@pytest.fixture(scope="module")
def smollm(chat_file, started_with):
    """The address of a server of the model, from its GGUF file."""
    model = NeuronAutoModelForCausalLM.from_pretrained(chat_file, n_positions=1024)
    model.to_neuron()
    tokenizer = AutoTokenizer.from_pretrained(chat_file.parent, gguf_file=chat_file.name)
    with Engine(model, rows=16, tokenizer=tokenizer) as engine:
        yield started_with(Server({NAME: ServedModel(engine, NAME)}, Settings())).address()


@pytest.fixture(scope="module")
def sdk(smollm):
    return OpenAI(base_url=f"{smollm}/v1", api_key="none", max_retries=0)


def asked(question):
    return [dict(role="user", content=question)]


def test_ten_turns_through_the_sdk_and_the_page(chat_model, sdk, smollm, tab):
    page = tab(smollm)
    set_option(page, "temperature", "0")
    set_option(page, "max_tokens", str(NEW))
    messages, before = [], 0
    for question in QUESTIONS:
        messages += asked(question)
        answer = sdk.chat.completions.create(messages=messages, **HOW)
        text, used = answer.choices[0].message.content, answer.usage
        assert text and ask(page, question) == text.rstrip()
        assert used.prompt_tokens_details.cached_tokens > before - PAGE, "what was there before is not computed again"
        before = used.prompt_tokens
        messages.append(dict(role="assistant", content=text))
    assert "Paris" in messages[1]["content"] and "Rome" in messages[3]["content"]

    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    model = AutoModelForCausalLM.from_pretrained(chat_model, dtype=torch.float32)
    given = tokenizer.apply_chat_template(
        messages[:-1], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    length = given["input_ids"].shape[1]
    told = model.generate(**given, do_sample=False, max_new_tokens=NEW)[0, length:]
    assert length == before and tokenizer.decode(told, skip_special_tokens=True) == messages[-1]["content"]


class Country(BaseModel):
    country: Literal["France", "Italy", "Spain"]
    capital: str
    language: Literal["French", "Italian", "Spanish"]


def test_json_with_sensible_values(sdk):
    told = "Rome is the capital of Italy, where people speak Italian. Tell me this as JSON."
    answer = sdk.chat.completions.parse(messages=asked(told), response_format=Country, **HOW | dict(max_tokens=60))
    assert answer.choices[0].message.parsed == Country(country="Italy", capital="Rome", language="Italian")


def test_a_tool_is_called(sdk):
    city = dict(type="object", properties=dict(city=dict(type="string")), required=["city"])
    tools = [dict(type="function", function=dict(name="weather", description="The weather now", parameters=city))]
    answer = sdk.chat.completions.create(
        messages=asked("What is the weather in Paris?"), tools=tools, tool_choice="required",
        parallel_tool_calls=False, **HOW | dict(max_tokens=60),
    )  # fmt: skip
    [call] = answer.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Paris"}')
    assert answer.choices[0].finish_reason == "tool_calls"


def test_sixteen_users_at_once(sdk):
    numbered = [f"{question} Answer number {number}." for number in range(2) for question in QUESTIONS[:8]]
    alone = [sdk.chat.completions.create(messages=asked(each), **HOW).choices[0].message.content for each in numbered]

    def streamed(question):
        events = sdk.chat.completions.create(messages=asked(question), stream=True, **HOW)
        return "".join(event.choices[0].delta.content or "" for event in events)

    with ThreadPoolExecutor(len(numbered)) as users:
        assert list(users.map(streamed, numbered)) == alone
