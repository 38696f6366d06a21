"""A server in a thread, with the bundled checkpoint and a chat template."""

import threading
import time
from pathlib import Path

import pytest
from openai import OpenAI
from transformers import AutoTokenizer

from transformers_neuronx import Engine
from transformers_neuronx.gpt2.model import GPT2ForSampling
from transformers_neuronx.server.app import Server
from transformers_neuronx.server.running import Running
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
def started(engine):
    """`started(**settings)`: a server that runs, with its address."""
    all_running = []

    def start(**settings):
        running = Running(Server(engine, Settings(**dict(names=["tiny-kjv"]) | settings)), "127.0.0.1", 0)
        thread = threading.Thread(target=running.run)
        thread.start()
        all_running.append((running, thread))
        while not running.started:
            assert thread.is_alive(), "the server starts"
            time.sleep(0.01)
        return running

    yield start
    for running, thread in all_running:
        running.should_exit = True
        thread.join()


@pytest.fixture(scope="session")
def url(started):
    return started().address()


@pytest.fixture(scope="session")
def client(url):
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
