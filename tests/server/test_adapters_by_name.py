"""Adapters in a server: they are models to clients, and come and go while it runs."""

import httpx2
import openai
import pytest
from lora_files import write_adapter
from openai import OpenAI

from transformers_neuronx import Engine
from transformers_neuronx.cli import service
from transformers_neuronx.errors import CheckpointError, ConfigError
from transformers_neuronx.server.app import Server
from transformers_neuronx.server.models import ServedModel
from transformers_neuronx.server.settings import Settings

TEXT = "In the beginning God created"


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    where = tmp_path_factory.mktemp("adapters")
    return [write_adapter(where / f"{seed}", seed) for seed in (1, 2)]


@pytest.fixture(scope="module")
def url(model, tokenizer, started_with, directories):
    how = dict(rows=4, step_tokens=32, tokenizer=tokenizer, max_loras=2)
    with Engine(model, **how) as engine:
        engine.load_adapter("first", directories[0])
        served = Server({"tiny-kjv": ServedModel(engine, "tiny-kjv")}, Settings(updates_adapters=True))
        yield started_with(served).address()


@pytest.fixture(scope="module")
def client(url):
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def completed(client, name):
    answer = client.completions.create(model=name, prompt=TEXT, max_tokens=8, temperature=0)
    assert answer.model == name
    return answer.choices[0].text


def test_an_adapter_is_a_model_to_clients(client):
    ids = [(each.id, getattr(each, "parent", None)) for each in client.models.list()]
    assert ids == [("tiny-kjv", None), ("first", "tiny-kjv")]
    assert client.models.retrieve("first").root == "tiny-kjv"
    assert completed(client, "first") != completed(client, "tiny-kjv")
    how = dict(messages=[dict(role="user", content="Who made heaven?")], max_tokens=8, temperature=0)
    answer = client.chat.completions.create(model="first", **how)
    stream = [*client.chat.completions.create(model="first", stream=True, **how)]
    assert {chunk.model for chunk in stream} == {answer.model} == {"first"}
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == answer.choices[0].message.content
    vectors = [client.embeddings.create(model=name, input=TEXT) for name in ("first", "tiny-kjv")]
    assert vectors[0].model == "first" and vectors[0].data[0].embedding != vectors[1].data[0].embedding


def test_adapters_come_and_go(url, client, directories):
    def told(what, **body):
        answer = httpx2.post(f"{url}/v1/{what}_lora_adapter", json=body)
        return answer.status_code, answer.json() if answer.status_code == 200 else answer.json()["error"]["message"]

    status, said = told("load", lora_name="second", lora_path=str(directories[1]))
    assert (status, said) == (200, "Success: LoRA adapter 'second' added successfully.")
    assert len({completed(client, name) for name in ("tiny-kjv", "first", "second")}) == 3
    assert told("load", lora_name="second", lora_path="x")[0] == 400, "the name is taken"
    assert "is the name of a model" in told("load", lora_name="tiny-kjv", lora_path="x")[1]
    status, said = told("load", lora_name="third", lora_path="/nowhere")
    assert status == 400 and "expected a regular file, found nothing" in said
    assert told("unload", lora_name="second")[0] == 200
    with pytest.raises(openai.NotFoundError, match="there is no model 'second' here"):
        completed(client, "second")
    assert told("unload", lora_name="second") == (400, "there is no adapter 'second'; this engine has: first")


def test_clients_cannot_load_adapters_unless_the_server_lets_them(started, directories):
    body = dict(lora_name="one", lora_path=str(directories[0]))
    assert httpx2.post(f"{started().address()}/v1/load_lora_adapter", json=body).status_code == 404


def test_a_service_opens_its_adapters_first(tmp_path):
    """A damaged one is an error before a model is opened. Several models have no adapters."""
    loras = service.Loras(dict(one=str(tmp_path)), 1, 8)
    how = [None, None, None, None, {}, Settings(), False, None, loras]
    with pytest.raises(CheckpointError, match="adapter_model"), service.Service({"nowhere": ["m"]}, *how).opened():
        pass
    with pytest.raises(ConfigError, match="adapters are for one model"):
        service.Service({"a": ["a"], "b": ["b"]}, *how)
