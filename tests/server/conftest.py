"""A server in a thread, with the bundled checkpoint and a chat template, and a browser."""

from pathlib import Path

import pytest
from devtools import Browser, Tab
from in_threads import servers
from openai import OpenAI
from transformers import AutoTokenizer

from transformers_neuronx import Engine
from transformers_neuronx.gpt2.model import GPT2ForSampling
from transformers_neuronx.server.app import Server
from transformers_neuronx.server.models import ServedModel
from transformers_neuronx.server.settings import Settings

TINY_KJV = Path(__file__).parents[2] / "examples" / "tiny-kjv"
TEMPLATE = (
    "{% if tools %}{{ tools | map(attribute='function.name') | join(', ') }} in <tool_call>\n{% endif %}"
    "{% if messages[0].role == 'teapot' %}{{ raise_exception('no teapots') }}{% endif %}"
    "{% for message in messages %}{{ message.content }}\n{% endfor %}{% if add_generation_prompt %}Answer: {% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(TINY_KJV)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="session")
def model():
    model = GPT2ForSampling.from_pretrained(TINY_KJV, n_positions=256, batch_size=2)
    model.to_neuron()
    return model


@pytest.fixture(scope="session")
def engine(model, tokenizer):
    with Engine(model, rows=4, step_tokens=32, tokenizer=tokenizer) as engine:
        yield engine


@pytest.fixture(scope="session")
def started_with():
    """`started_with(server)`: a server that runs, with its address."""
    with servers() as start:
        yield start


@pytest.fixture(scope="session")
def started(engine, started_with):
    """`started(name, **settings)`: a server of the bundled checkpoint that runs."""

    def start(name="tiny-kjv", **settings):
        return started_with(Server({name: ServedModel(engine, name)}, Settings(**settings)))

    return start


@pytest.fixture(scope="session")
def url(started):
    return started().address()


@pytest.fixture(scope="session")
def client(url):
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def tab(browser):
    """`tab(url)`: the page of a server. After the test its console must have nothing but what is `allowed`."""
    all_open = []

    def opened(url, allowed="nothing", **how):
        all_open.append((Tab(browser, f"{url}/", **how), allowed))
        all_open[-1][0].wait("document.title.includes('·') || document.querySelector('#health').matches('.bad')")
        return all_open[-1][0]

    yield opened
    for each, allowed in all_open:
        assert not [line for line in each.console() if allowed not in line]
        each.close()
