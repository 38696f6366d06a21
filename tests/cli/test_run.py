"""`run` over files of prompts: complete, exact, and computed once, wherever it was stopped."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
from bundled import ROOT, TINY_KJV
from transformers import AutoModelForCausalLM, AutoTokenizer

PLACES = ["Egypt", "Judah", "Babylon", "Zion", "the wilderness", "the mount", "the river", "Israel"]


def written(path, prompts):
    path.write_text("".join(json.dumps(dict(prompt=prompt)) + "\n" for prompt in prompts))
    return path


def results(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def expected():
    """`expected(prompt, count)`: the completion by Transformers."""
    tokenizer = AutoTokenizer.from_pretrained(TINY_KJV)
    model = AutoModelForCausalLM.from_pretrained(TINY_KJV, dtype=torch.float32)

    def made(prompt, count):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        new = model.generate(ids, max_new_tokens=count, do_sample=False)[0, ids.shape[1] :]
        return tokenizer.decode(new, skip_special_tokens=True)

    return made


def test_the_program_of_the_generative_inference_tutorial(command, tmp_path, expected):
    """It has the tutorial's options, files and separator of predictions."""
    folder = tmp_path / "prompts"
    folder.mkdir()
    written(folder / "b.jsonl", ["And Moses", "And it came to pass"])
    (folder / "a.json").write_text(json.dumps([dict(prompt="In the beginning"), dict(prompt="Thou shalt", label=1)]))
    printed, _ = command(
        *("run", "--model_name_or_path", TINY_KJV, "--data_dir", folder, "--cache_dir", tmp_path, "--amp", "f32"),
        *("--max_seq_length", "64", "--max_tokens_to_generate", "12", "--examples_to_generate", "3"),
    )
    prompts = ["In the beginning", "Thou shalt", "And Moses"]
    assert printed.rstrip("\n").split(f"\n{'-' * 20}\n") == [prompt + expected(prompt, 12) for prompt in prompts]
    made = results(tmp_path / "predictions.jsonl")
    assert [(record["file"], record["line"]) for record in made] == [("a.json", 1), ("a.json", 2), ("b.jsonl", 1)]
    assert [record["prompt"] for record in made] == prompts
    assert all(record["new_tokens"] == 12 and record["prompt_tokens"] > 1 for record in made)


def test_weights_from_elsewhere(command, tmp_path, expected):
    data = written(tmp_path / "data.jsonl", ["And Moses"])
    torch.save(AutoModelForCausalLM.from_pretrained(TINY_KJV).state_dict(), tmp_path / "weights.pt")
    bare = tmp_path / "configuration"
    bare.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (bare / name).write_bytes((TINY_KJV / name).read_bytes())
    arguments = ("run", "--config_name", bare, "--data_dir", data, "--amp", "f32", "--json")
    _, error = command(*arguments, status=1)
    assert "no checkpoint here" in error
    printed, _ = command(*arguments, "--checkpoint_name", tmp_path / "weights.pt")
    assert json.loads(printed) == dict(output="predictions.jsonl", results=1, bad=0, new_tokens=20)
    assert results(tmp_path / "predictions.jsonl")[0]["completion"] == expected("And Moses", 20)


def test_lines_that_are_no_prompts_do_not_stop_the_others(command, tmp_path, expected):
    lines = [
        '{"prompt": "And Moses"}',
        "{oops}",
        "",
        '{"text": "x"}',
        '["prompt"]',
        '{"prompt": ""}',
        '{"prompt": "Thou"}',
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    arguments = ("run", TINY_KJV, "--data_dir", "data.jsonl", "--amp", "f32", "--batch_size", 2, "--json")
    printed, error = command(*arguments, status=3)
    assert json.loads(printed) == dict(output="predictions.jsonl", results=2, bad=4, new_tokens=40)
    said = [line for line in error.splitlines() if line.startswith("data.jsonl, line")]
    assert said == [
        "data.jsonl, line 2: not JSON: Expecting property name enclosed in double quotes at column 2",
        'data.jsonl, line 4: must be an object with a string as "prompt"; got the keys text',
        'data.jsonl, line 5: must be an object with a string as "prompt"; got a list',
        "data.jsonl, line 6: the prompt is empty",
    ]
    made = results(tmp_path / "predictions.jsonl")
    assert [record["line"] for record in made] == [1, 2, 4, 5, 6, 7]
    assert [record["completion"] for record in made if "error" not in record] == [
        expected(prompt, 20) for prompt in ("And Moses", "Thou")
    ]
    again, _ = command(*arguments, status=3)
    assert again == printed and results(tmp_path / "predictions.jsonl") == made


def test_prompts_that_are_too_long_are_cut(command, tmp_path, expected):
    text = "And it came to pass in those days that there went out a man of the house of Levi"
    data = written(tmp_path / "data.jsonl", [text])
    command("run", TINY_KJV, "--data_dir", data, "--max_seq_length", 16, "--max_tokens_to_generate", 10, "--amp", "f32")
    [record] = results(tmp_path / "predictions.jsonl")
    assert record["truncated"] and record["prompt_tokens"] == 6
    tokenizer = AutoTokenizer.from_pretrained(TINY_KJV)
    assert record["completion"] == expected(tokenizer.decode(tokenizer(text).input_ids[:6]), 10)
    _, error = command(
        "run", TINY_KJV, "--data_dir", data, "--max_seq_length", 10, "--max_tokens_to_generate", 10, "-o", "x", status=2
    )
    assert "10 new tokens leave no room for a prompt in 10" in error


@pytest.mark.parametrize(
    ("seed", "count", "kills"),
    [(0, 40, 1), pytest.param(1, 200, 3, marks=pytest.mark.slow), pytest.param(2, 200, 3, marks=pytest.mark.slow)],
)
def test_killed_at_any_moment_it_goes_on_and_repeats_nothing(tmp_path, seed, count, kills):
    draw = random.Random(seed)
    prompts = [
        f"{'And it came to pass ' * draw.choice([0, 0, 1, 12])}And {draw.choice(PLACES)} number {number} said unto"
        for number in range(count)
    ]
    written(tmp_path / "data.jsonl", prompts)
    arguments = [sys.executable, "-m", "transformers_neuronx", "run", TINY_KJV, "--data_dir", "data.jsonl"]
    arguments += ["--examples_to_generate", str(count), "--batch_size", "4", "--top-k", "40", "--seed", "7"]
    environment = os.environ | dict(PYTHONPATH=str(ROOT), HF_HUB_OFFLINE="1")
    options = dict(cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    whole = subprocess.run([*arguments, "--output", "whole.jsonl"], check=True, **options)
    output, part = tmp_path / "predictions.jsonl", count // (kills + 3)
    for number in range(kills):
        wanted = draw.randrange(1, part) + part * number
        process = subprocess.Popen(arguments, **options)
        while process.poll() is None and not (output.exists() and output.read_bytes().count(b"\n") >= wanted):
            time.sleep(0.005)
        process.send_signal(draw.choice([signal.SIGKILL, signal.SIGINT, signal.SIGTERM]))
        process.communicate()
    lines = output.read_bytes().splitlines(keepends=True)
    assert 0 < len(lines) < count
    with open(output, "ab") as file:  # as if it had been killed while it wrote
        file.write(b'{"file": "data.jsonl", "li')
    last = subprocess.run(arguments, check=True, **options)
    assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert output.read_bytes().startswith(b"".join(lines)) and last.stdout == whole.stdout
    assert [record["prompt"] for record in results(output)] == prompts


def test_results_of_other_settings_are_not_added_to(command, tmp_path):
    data = written(tmp_path / "data.jsonl", ["And Moses", "Thou shalt"])
    arguments = ["run", TINY_KJV, "--data_dir", data, "--max_seq_length", 64, "--json"]
    command(*arguments)
    _, error = command(*arguments, "--top-k", 2, status=2)
    assert "predictions.jsonl was made with other settings: rules.top_k: saved 1, expected 2. --restart starts" in error
    written(data, ["And Aaron", "Thou shalt"])
    _, error = command(*arguments, status=2)
    assert "has a result for another prompt in data.jsonl, line 1. --restart starts over" in error
    printed, _ = command(*arguments, "--restart")
    assert json.loads(printed)["results"] == 2
    assert results(tmp_path / "predictions.jsonl")[0]["prompt"] == "And Aaron"


def test_results_in_the_folder_of_prompts_are_not_read_as_such(command, tmp_path):
    written(tmp_path / "data.jsonl", ["And Moses", "Thou shalt"])
    arguments = ("run", TINY_KJV, "--data_dir", ".", "--json")
    first, _ = command(*arguments)
    before = (tmp_path / "predictions.jsonl").read_bytes()
    assert json.loads(first)["results"] == 2
    assert command(*arguments) == (first, "") and (tmp_path / "predictions.jsonl").read_bytes() == before


def test_prompts_that_are_left_out_are_mentioned(command, tmp_path):
    data = written(tmp_path / "data.jsonl", ["And Moses", "Thou shalt"])
    printed, said = command("run", TINY_KJV, "--data_dir", data, "--examples_to_generate", 1, "--json")
    assert json.loads(printed)["results"] == 1
    assert said == "only the first 1 prompts are read: --examples-to-generate sets how many\n"


def test_what_is_missing_is_said(command, tmp_path):
    _, error = command("run", "--data_dir", tmp_path, status=2)
    assert "expected a MODEL, --model-name-or-path or --config-name" in " ".join(error.split())
    _, error = command("run", TINY_KJV, "--data_dir", tmp_path, status=1)
    assert error == f"error: {tmp_path}: expected .json or .jsonl files, found none\n"
    (tmp_path / "empty.jsonl").touch()
    _, error = command("run", TINY_KJV, "--data_dir", "empty.jsonl", status=1)
    assert error == 'error: empty.jsonl has no prompts: expected objects with "prompt", one per line\n'
    _, error = command("run", TINY_KJV, status=2)
    assert "Missing option '--data-dir'" in error
