"""`run` lets an engine answer: the same completions as one by one, in order, from any number of prompts at once."""

import json

import pytest
import torch
from bundled import TINY_KJV
from transformers import AutoTokenizer, T5Config, T5ForConditionalGeneration

from transformers_neuronx.cli import run
from transformers_neuronx.cli.engines import FEW, ROWS, WINDOW
from transformers_neuronx.cli.text import complete
from transformers_neuronx.errors import EngineError
from transformers_neuronx.gpt2.model import GPT2ForSampling
from transformers_neuronx.serving.engine import Engine
from transformers_neuronx.serving.handles import Handle
from transformers_neuronx.t5.model import T5ForSampling

TOKENIZER = AutoTokenizer.from_pretrained(TINY_KJV)
COMMA = TOKENIZER(",").input_ids[0]
NEW = 24
STEM = "And it came to pass in those days that there went out a man of the house of Levi " * 4
PROMPTS = [STEM[: 5 + 40 * (place % 6)] + str(place) for place in range(11)]
SAMPLED = ("--top-k", 40, "--temperature", 0.9, "--repetition-penalty", 1.2, "--seed", 7)
RULES = dict(top_k=40, temperature=0.9, repetition_penalty=1.2)
OPTIONS = ("--max-tokens-to-generate", NEW, "--max-seq-length", 128, "--amp", "f32", "--json", "--restart")


@pytest.fixture
def checkpoint(tmp_path):
    """The bundled checkpoint, for which a comma ends a text, and a file of prompts; one line is bad."""
    (tmp_path / "model").mkdir()
    for path in TINY_KJV.iterdir():
        if path.name != "generation_config.json":
            (tmp_path / "model" / path.name).symlink_to(path)
    ends = dict(eos_token_id=[1022, COMMA])
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(ends))
    lines = [json.dumps(dict(prompt=prompt)) for prompt in PROMPTS]
    (tmp_path / "data.jsonl").write_text("\n".join([*lines[:2], "{oops}", *lines[2:]]))
    return tmp_path / "model"


def results(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def expected():
    """The tokens of each prompt, alone in `sample()`. The seed counts lines."""
    model = GPT2ForSampling.from_pretrained(TINY_KJV, n_positions=128)
    model.config.eos_token_id = [1022, COMMA]
    model.to_neuron()
    places = [0, 1, *range(3, len(PROMPTS) + 1)]
    return [
        complete(model, [TOKENIZER(prompt).input_ids], NEW, **RULES, seed=[7 + place])[0]
        for prompt, place in zip(PROMPTS, places, strict=True)
    ]


def check(made, expected):
    assert [record["line"] for record in made] == list(range(1, len(PROMPTS) + 2))
    assert "oops" not in made[2] and "not JSON" in made[2]["error"]
    good = made[:2] + made[3:]
    assert [record["prompt"] for record in good] == PROMPTS
    assert [record["completion"] for record in good] == [
        TOKENIZER.decode(ids, skip_special_tokens=True) for ids in expected
    ]
    assert [record["new_tokens"] for record in good] == [len(ids) for ids in expected]


@pytest.mark.parametrize("size", [pytest.param((), marks=pytest.mark.slow), ("--batch-size", 1), ("--batch-size", 3)])
def test_completions_are_those_of_each_prompt_alone(command, checkpoint, tmp_path, expected, size):
    assert len({len(ids) for ids in expected}) > 3, "prompts must end at different times"
    printed, _ = command("run", checkpoint, "--data-dir", "data.jsonl", *OPTIONS, *SAMPLED, *size, status=3)
    check(results(tmp_path / "predictions.jsonl"), expected)
    summary = json.loads(printed)
    assert summary["results"] == len(PROMPTS) and summary["new_tokens"] == sum(map(len, expected))


@pytest.mark.parametrize("size", [pytest.param((), marks=pytest.mark.slow), ("--batch-size", 3)])
@pytest.mark.slow
def test_over_the_slots_of_a_model_too(process, checkpoint, tmp_path, expected, size):
    arguments = ("run", checkpoint, "--data-dir", "data.jsonl", *OPTIONS, *SAMPLED)
    process(*arguments, *size, status=3, NEURONX_KERNELS="off")
    check(results(tmp_path / "predictions.jsonl"), expected)
    saved = json.loads((tmp_path / "predictions.jsonl.settings.json").read_text())["options"]
    assert (saved["batch_size"], saved["prompt_batch_size"]) == (3 if size else 8, 1)


def test_a_run_continues_with_another_batch_size(command, checkpoint, tmp_path, expected):
    arguments = ("run", checkpoint, "--data-dir", "data.jsonl", *OPTIONS[:-1], *SAMPLED)
    command(*arguments, "--examples-to-generate", FEW, "--batch-size", 1, status=3)
    before = (tmp_path / "predictions.jsonl").read_bytes()
    assert before.count(b"\n") == FEW
    command(*arguments, "--batch-size", 3, status=3)
    assert (tmp_path / "predictions.jsonl").read_bytes().startswith(before)
    check(results(tmp_path / "predictions.jsonl"), expected)


@pytest.fixture
def submitted(monkeypatch):
    """The handles of all requests."""
    handles, submit = [], Engine.submit

    def noted(self, prompt, params):
        handles.append(submit(self, prompt, params))
        return handles[-1]

    monkeypatch.setattr(Engine, "submit", noted)
    return handles


@pytest.mark.parametrize("at_once", [1, None])
def test_few_more_are_submitted_than_are_written(command, tmp_path, submitted, monkeypatch, at_once):
    window, count = WINDOW * (at_once or ROWS), 150
    lines = [json.dumps(dict(prompt=f"{number} And")) for number in range(count)]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    ahead, add = [], vars(run)["Results"].add

    def noted(self, record):
        ahead.append(len(submitted) - len(self.done))
        add(self, record)

    monkeypatch.setattr(vars(run)["Results"], "add", noted)
    size = ("--batch-size", at_once) if at_once else ()
    arguments = ("--data-dir", "data.jsonl", "--max-tokens-to-generate", 2, *OPTIONS[2:])
    command("run", TINY_KJV, *arguments, "--examples-to-generate", count, *size)
    assert len(submitted) == len(ahead) == count
    assert ahead[:-window] == [window] * (count - window) and max(ahead) == window


def test_prompts_share_what_they_begin_with(command, tmp_path, submitted):
    lines = [json.dumps(dict(prompt=f"{STEM}{number}")) for number in range(3)]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    command("run", TINY_KJV, "--data-dir", "data.jsonl", *OPTIONS, "--batch-size", 1)
    cached = [handle.usage.cached_tokens for handle in submitted]
    assert len(TOKENIZER(STEM).input_ids) > 64 and cached == [0, 64, 64]


def test_a_prompt_that_fails_is_named_and_those_before_it_are_kept(command, tmp_path, submitted, monkeypatch):
    lines = [json.dumps(dict(prompt=f"{number} And")) for number in range(6)]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    arguments = ("run", TINY_KJV, "--data-dir", "data.jsonl", *OPTIONS[:-1])
    result = Handle.result

    def failing(self, *arguments):
        if self is submitted[3]:
            raise EngineError("request 3 failed: its logits are NaN or all -inf")
        return result(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Handle, "result", failing)
        _, said = command(*arguments, status=1)
    assert said == "error: data.jsonl, line 4: request 3 failed: its logits are NaN or all -inf\n"
    assert [record["line"] for record in results(tmp_path / "predictions.jsonl")] == [1, 2, 3]
    command(*arguments)
    assert [record["line"] for record in results(tmp_path / "predictions.jsonl")] == [1, 2, 3, 4, 5, 6]


def test_where_all_is_done_no_engine_is_made(command, checkpoint, monkeypatch):
    arguments = ("run", checkpoint, "--data-dir", "data.jsonl", *OPTIONS[:-1])
    first, _ = command(*arguments, status=3)
    monkeypatch.setattr(GPT2ForSampling, "to_neuron", None)
    assert command(*arguments, status=3)[0] == first


@pytest.mark.slow
def test_a_model_with_an_encoder_too(command, tmp_path, submitted):
    torch.manual_seed(0)
    sizes = dict(vocab_size=1023, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
    T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, eos_token_id=1022)).save_pretrained("t5")
    TOKENIZER.save_pretrained("t5")
    lines = [json.dumps(dict(prompt=prompt)) for prompt in PROMPTS[:3]]
    (tmp_path / "data.jsonl").write_text("\n".join([lines[0], "{oops}", *lines[1:]]))
    arguments = ("run", "t5", "--data-dir", "data.jsonl", "--max-tokens-to-generate", 8, "--top-k", 40, "--json")
    printed, _ = command(*arguments, "--batch-size", 2, status=3)
    model = T5ForSampling.from_pretrained("t5", n_positions=128, context_length_estimate=128)
    model.to_neuron()
    made = results(tmp_path / "predictions.jsonl")
    assert json.loads(printed)["results"] == 3 and len(submitted) == 3
    assert [record["line"] for record in made] == [1, 2, 3, 4] and "error" in made[1]
    for place, prompt in ((0, PROMPTS[0]), (2, PROMPTS[1]), (3, PROMPTS[2])):
        [ids] = complete(model, [TOKENIZER(prompt).input_ids], 8, top_k=40, seed=[place])
        assert made[place]["completion"] == TOKENIZER.decode(ids, skip_special_tokens=True)
    (tmp_path / "predictions.jsonl").write_bytes(
        b"".join((tmp_path / "predictions.jsonl").read_bytes().splitlines(keepends=True)[:1])
    )
    command(*arguments, "--batch-size", 2, status=3)
    assert results(tmp_path / "predictions.jsonl") == made
