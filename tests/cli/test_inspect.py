"""`inspect` of a checkpoint, an artifact and a module: as text, as JSON, as a page, as HLO."""

import json
import re

import pytest
from bundled import TINY_KJV

from transformers_neuronx.analysis.inspection import facts_of_model
from transformers_neuronx.gpt2.model import GPT2ForSampling

pytestmark = pytest.mark.compiled_ahead


@pytest.fixture(scope="module")
def model():
    model = GPT2ForSampling.from_pretrained(TINY_KJV, n_positions=64, amp="bf16")
    model.to_neuron()
    return model


def test_a_checkpoint_in_eighty_columns(command):
    printed, _ = command("inspect", TINY_KJV, "--n-positions", 64, "--tp", 2)
    assert printed.startswith("gpt2, 1,386,368 parameters, f32, on each of 2 devices:\n")
    assert max(map(len, printed.splitlines())) <= 80
    assert "step_tokens1_sequences1_samples1" in printed and "embed" in printed


def test_an_artifact_has_the_same_facts_as_the_model(command, model, tmp_path):
    model.save(tmp_path / "artifact", sharded_weights=True)
    printed, _ = command("inspect", "artifact", "--json")
    assert json.loads(printed) == json.loads(json.dumps(facts_of_model(model.decoder).as_dict()))


def test_the_page_has_the_numbers_of_the_json(command, tmp_path):
    printed, _ = command("inspect", TINY_KJV, "--n-positions", 64, "--html", "facts.html", "--json")
    page = (tmp_path / "facts.html").read_text()
    [embedded] = re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', page, re.S)
    assert json.loads(embedded) == json.loads(printed)
    printed, _ = command("inspect", TINY_KJV, "--n-positions", 64, "--html", "facts.html")
    assert printed == "written to facts.html\n"


def test_a_module_and_its_hlo(command, model, tmp_path):
    modules = {program.name: program.module for program in model.decoder.store.stored.values()}
    (tmp_path / "loop.pb").write_bytes(modules["step_tokens1_sequences1_samples1"].SerializeToString())
    printed, _ = command("inspect", "loop.pb")
    assert printed.startswith("step_tokens1_sequences1_samples1\n")
    alone, _ = command("inspect", "loop.pb", "--hlo", "step_tokens1_sequences1_samples1")
    among, _ = command(
        "inspect", TINY_KJV, "--n-positions", 64, "--amp", "bf16", "--hlo", "step_tokens1_sequences1_samples1"
    )
    assert alone == among and "while" in alone


def test_what_cannot_be_inspected(command, tmp_path):
    (tmp_path / "not.pb").write_bytes(b"\xff\xff\xff")
    _, said = command("inspect", "not.pb", status=1)
    assert "not.pb: not a module" in said
    _, said = command("inspect", TINY_KJV, "--n-positions", 64, "--hlo", "loop", status=2)
    assert "--hlo must be one of step_tokens1_sequences1_samples1, " in said
    _, said = command("inspect", "./nothing", status=1)
    assert "no such directory" in said
