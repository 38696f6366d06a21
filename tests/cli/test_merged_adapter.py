"""`--adapter`: commands merge a LoRA adapter into the weights."""

import json

import pytest
from bundled import TINY_KJV
from lora_files import write_adapter

pytestmark = pytest.mark.compiled_ahead

PROMPT = "And God said unto Moses,"


@pytest.fixture
def adapter(tmp_path):
    return write_adapter(tmp_path / "adapter", seed=1)


def test_generate_run_and_an_artifact_have_it(command, adapter, tmp_path):
    how = ("-n", 8, "--top-k", 1, "--json")

    def generated(model, *options):
        return json.loads(command("generate", model, PROMPT, *how, *options)[0])["completion"]

    plain, merged = (generated(TINY_KJV, *options) for options in ((), ("--adapter", adapter)))
    assert plain == " I will not hearken unto thee," != merged
    (tmp_path / "prompt.jsonl").write_text(json.dumps(dict(prompt=PROMPT)))
    run = ("--data-dir", tmp_path / "prompt.jsonl", "--max-tokens-to-generate", 8, "--adapter", adapter)
    command("run", TINY_KJV, *run, "--output", tmp_path / "out.jsonl")
    assert json.loads((tmp_path / "out.jsonl").read_text())["completion"] == merged
    assert json.loads((tmp_path / "out.jsonl.settings.json").read_text())["adapter"] == str(adapter)
    sizes = ("--n-positions", 128, "--context", 32)
    command("compile", TINY_KJV, tmp_path / "artifact", "--adapter", adapter, *sizes)
    assert generated(tmp_path / "artifact") == merged


def test_it_needs_weights(command, adapter, tmp_path):
    _, said = command("compile", TINY_KJV, tmp_path / "programs", "--no-weights", "--adapter", adapter, status=2)
    assert "--adapter changes weights, so it needs --weights" in " ".join(said.split())
    _, said = command("generate", TINY_KJV, PROMPT, "--adapter", tmp_path, status=1)
    assert "adapter_model.safetensors" in said
