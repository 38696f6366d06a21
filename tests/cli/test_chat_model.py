"""A trained chat model gives the answers of Transformers, token by token, in Python and on the command line."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from transformers_neuronx.huggingface.auto import NeuronAutoModelForCausalLM

pytestmark = pytest.mark.slow

CAPITAL = "What is the capital of France?"
CONVERSATIONS = {
    "a question": [dict(role="user", content=CAPITAL)],
    "with a system": [
        dict(role="system", content="You are a poet. Answer in verse."),
        dict(role="user", content="Why is the sky blue?"),
    ],
    "that goes on": [
        dict(role="user", content=CAPITAL),
        dict(role="assistant", content="The capital of France is Paris."),
        dict(role="user", content="Name three things that one should see there."),
    ],
}
NEW = 40


@pytest.fixture(scope="module")
def reference(chat_model):
    """`answer(messages)`: the prompt's tokens, and Transformers' greedy ones after it up to the end."""
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    model = AutoModelForCausalLM.from_pretrained(chat_model, dtype=torch.float32)

    def answer(messages):
        given = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        return given["input_ids"], model.generate(**given, do_sample=False, max_new_tokens=NEW)

    return answer


@pytest.mark.parametrize("degree", [1, 3])
def test_its_answers_are_those_of_transformers(chat_model, reference, degree):
    model = NeuronAutoModelForCausalLM.from_pretrained(chat_model, n_positions=128, tp_degree=degree)
    model.to_neuron()
    ended = 0
    for messages in CONVERSATIONS.values():
        prompt, want = reference(messages)
        assert torch.equal(model.sample(prompt, prompt.shape[1] + NEW, top_k=1), want)
        ended += want[0, -1].item() in model.eos_token_ids
    assert ended, "no answer comes to its end"


def test_it_answers_on_the_command_line(chat_model, reference, process):
    options = ("--chat", "-n", NEW, "--top-k", 1, "--json")
    printed, said = process("generate", chat_model, CAPITAL, *options)
    prompt, want = reference(CONVERSATIONS["a question"])
    text = AutoTokenizer.from_pretrained(chat_model).decode(want[0, prompt.shape[1] :], skip_special_tokens=True)
    assert json.loads(printed)["completion"] == text and "Paris" in text
    assert said.count("change nothing here either: _model_name_or_path, unk_token_id.\n") == 1
