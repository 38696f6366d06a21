"""`lint` of a module and of a checkpoint: its text, its JSON, its exit status."""

import importlib
import json

import pytest
from bundled import TINY_KJV

from transformers_neuronx import hlo
from transformers_neuronx.compiler import compile_py_func
from transformers_neuronx.gpt2.model import GPT2ForSampling
from transformers_neuronx.pyhlo import dtype_named
from transformers_neuronx.pyhlo.hlo_pb2 import BF16

FOUND = """\
ordered: 2 findings
  graph.py:12: erf (layer.0): is not supported [NCC_EVRF001]. Use the custom
    call AwsNeuronErf. (3 instructions)
  graph.py:13: sort: is not supported [NCC_EVRF029]. Take the largest with the
    custom call AwsNeuronTopK.
2 findings in 1 of 1 program, for trn2
"""
lint = importlib.import_module("transformers_neuronx.cli.lint")  # in `cli` the name is the function


def ordered(scribe):
    x = dtype_named("f32")[8].Parameter(parameter_number=0)
    for layer in range(3):
        with scribe.scope(f"layer.{layer}"):
            x = hlo.erf(x)
    return hlo.sort(x)[0]


@pytest.fixture
def saved(tmp_path):
    """The path of a module with faults in lines 12 and 13 of its graph's file."""
    module = compile_py_func(ordered)
    for instruction in module.computations[-1].instructions:
        instruction.metadata.source_file = "/models/graph.py"
        instruction.metadata.source_line = 12 if instruction.opcode == "erf" else 13
    path = tmp_path / "ordered.pb"
    path.write_bytes(module.SerializeToString())
    return path


def test_a_module(command, saved):
    printed, _ = command("lint", "ordered.pb", "--target", "trn2", status=4)
    assert printed == FOUND
    printed, _ = command("lint", saved, "--json", status=4)
    told = json.loads(printed)
    [program] = told["programs"]
    [finding] = program["findings"]
    assert told["target"] == "trn1" and program["name"] == "ordered"
    assert finding["opcode"] == "erf" and finding["count"] == 3 and finding["code"] == "NCC_EVRF001"
    assert finding["where"] == "/models/graph.py:12" and finding["scope"] == "layer.0"


def plain(_):
    return compile_py_func(lambda scribe: hlo.sin(scribe.f32[8].Parameter(parameter_number=0)))


def test_a_module_in_the_form_for_neuron(command, saved, monkeypatch):
    monkeypatch.setattr(lint, "neuron_form", plain)
    printed, _ = command("lint", saved, "--form")
    assert printed == "ordered: nothing found\n0 findings in 0 of 1 program, for trn1\n"
    command("lint", saved, status=4)


def test_a_checkpoint_and_its_configuration(command, monkeypatch):
    """Programs are written for the options, converted to Neuron's form, and linted."""
    written = []

    def form(module):
        written.append(module)
        return plain(module) if len(written) > 1 else compile_py_func(ordered)

    monkeypatch.setattr(lint, "neuron_form", form)
    options = ["--n-positions", 64, "--tp", 2, "--amp", "bf16", "--batch-size", 3, "--context", 16]
    printed, _ = command("lint", TINY_KJV, *options, status=4)
    assert max(map(len, printed.splitlines())) <= 80
    assert printed.startswith("step_rows3_active16_width64: 1 finding\n  test_lint_command.py:")
    assert printed.endswith(f"1 finding in 1 of {len(written)} programs, for trn1\n") and len(written) > 1
    assert printed.count(": nothing found\n") == len(written) - 1
    instructions = [each for computation in written[0].computations for each in computation.instructions]
    assert {len(group.replica_ids) for each in instructions for group in each.replica_groups} == {2}
    assert BF16 in {each.shape.element_type for each in instructions if each.opcode == "parameter"}
    before = len(written)
    printed, _ = command("lint", TINY_KJV / "config.json", "--n-positions", 64)
    assert len(written) > before and printed.startswith("step_rows1_active32_width64: nothing found\n")


@pytest.mark.compiled_ahead
def test_an_artifact(command, monkeypatch, tmp_path):
    model = GPT2ForSampling.from_pretrained(TINY_KJV, n_positions=64, context_length_estimate=16, amp="bf16")
    model.to_neuron()
    model.save(tmp_path / "artifact")
    monkeypatch.setattr(lint, "neuron_form", plain)
    printed, _ = command("lint", "artifact")
    assert printed.startswith("step_rows1_active16_width64: nothing found\n")


def test_what_cannot_be_linted(command, saved, tmp_path):
    (tmp_path / "not.pb").write_bytes(b"\xff\xff\xff")
    (tmp_path / "empty.pb").write_bytes(b"")
    for name, told in ("not.pb", "not a module"), ("empty.pb", "entry computation"), ("./nothing", "no such directory"):
        _, said = command("lint", name, status=1)
        assert told in said
    _, said = command("lint", saved, "--target", "trn9", status=2)
    assert "target must be one of neuron, trn1, inf2, trn2" in said
