"""`check`: a model against Transformers, another model, or itself with other settings."""

import json
import re
import shutil

import pytest
from bundled import TINY_KJV
from safetensors.torch import load_file, save_file
from transformers import T5Config

TEXT = "And God said unto Moses,"


def fits(printed):
    assert max(map(len, printed.splitlines())) <= 80
    return printed


@pytest.fixture
def edited(tmp_path):
    """Save the bundled checkpoint with one number changed, in a directory of that name."""
    shutil.copytree(TINY_KJV, tmp_path / "edited")
    weights = load_file(tmp_path / "edited" / "model.safetensors")
    weights["transformer.h.3.mlp.c_fc.weight"][5, 7] += 0.05
    save_file(weights, tmp_path / "edited" / "model.safetensors", metadata=dict(format="pt"))


def test_beside_transformers(command):
    printed, _ = command("check", TINY_KJV, TEXT, "-n", 8, "--amp", "bf16")
    assert f"model      {TINY_KJV}, bf16\n" in fits(printed)
    assert f"reference  {TINY_KJV} in Transformers, f32\n" in printed
    assert "text       6 tokens, and 8 that the reference generates\n" in printed
    assert [line.split()[0] for line in printed.splitlines() if re.match(r"  \S+ +\d\.\de-\d\d ", line)] == [
        "embed", *(f"layer.{number}" for number in range(6)), "head"
    ]  # fmt: skip
    assert printed.endswith("\nThe models agree: nothing is above the tolerance of 4.0e-02.\n")


def test_a_changed_weight_is_named_with_its_layer(command, edited):
    against = ("--against", TINY_KJV)
    printed, said = command("check", "edited", TEXT, "-n", 8, *against, "--against", "hf", status=4)
    assert said == ""
    assert "layer.3.mlp.up.weight                    1 of 65536 numbers\n" in fits(printed)
    assert "layer.3 has an error of its own above the tolerance of 1.0e-05.\n" in printed
    narrow, _ = command("check", "edited", TEXT, "-n", 2, *against, "--amp", "bf16", status=4)
    assert "layer.3 has an error of its own above the tolerance of 0.0e+00.\n" in narrow
    found, _ = command("check", "edited", "-n", 8, *against, "--json", status=4)
    told = json.loads(found)
    assert told["wrong"] == ["layer.3"] and told["prompt_tokens"] == 64 and len(told["places"]) == 72
    assert told["weights"] == [dict(name="layer.3.mlp.up.weight", count=1, total=65536)]
    loose, _ = command("check", "edited", TEXT, "-n", 8, *against, "--tolerance", 0.01, status=4)
    assert loose.endswith("\nlayer.3.mlp.up.weight differs from the reference's.\n")


def test_beside_itself_with_other_settings(command):
    how = ("--amp", "bf16", "--quant", "s8")
    settings = ("--against", "amp=f32,tp=2", "--against", "quant=none")
    printed, _ = command("check", TINY_KJV, TEXT, "-n", 4, *how, *settings)
    assert f"model      {TINY_KJV}, bf16, weights s8\n" in fits(printed)
    assert f"reference  {TINY_KJV}, f32, tp 2\n" in printed and "tolerance of 9.0e-02" in printed


def test_an_artifact(command):
    command("compile", TINY_KJV, "artifact", "--n-positions", 128, "--amp", "bf16")
    _, said = command("check", "artifact", status=2)
    assert said == (
        "error: artifact is an artifact, which Transformers cannot read: add --against PATH with its checkpoint or "
        "another model\n"
    )
    printed, _ = command("check", "artifact", TEXT, "-n", 4, "--against", "hf", "--against", TINY_KJV)
    assert "model      artifact, bf16\n" in printed and "bit by bit" in printed
    _, said = command("check", "artifact", TEXT, "--against", "tp=2", status=2)
    assert "was saved from another model or with other options: tp_degree: saved 1, expected 2" in said


def test_without_a_tokenizer_tokens_are_numbers(command, edited, tmp_path):
    for file in (tmp_path / "edited").glob("token*"):
        file.unlink()
    printed, _ = command("check", "edited", "-n", 4, "--quant", "s4", "--against", "quant=none")
    assert re.search(r"^ +\d+  \d+ +[\d.]+%  \d+ +[\d.]+%", fits(printed), re.M)


REFUSED = {
    "an unknown setting": (("--against", "dtype=f32"), 2, "be hf, a model, or some of amp=, tp=, quant=, runtime="),
    "two models": (("--against", "a", "--against", "b"), 2, "--against takes one other model, got a, b"),
    "degrees of Transformers": (("--against", "hf", "--against", "tp=2"), 2, "takes no setting but amp"),
    "a degree that is none": (("--against", "tp=two"), 2, "--against tp= must be a whole number, got 'two'"),
    "a type that is none": (("--against", "hf", "--against", "amp=f12"), 2, "must be one of f32, bf16, f16, got 'f12'"),
    "a model that is nowhere": (("--against", "./nothing"), 1, "./nothing: no such directory"),
    "too many tokens": (("-n", "510"), 2, "the model takes 512 tokens, got 6 and 510 new ones"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_checked(command, case):
    arguments, status, message = REFUSED[case]
    printed, said = command("check", TINY_KJV, TEXT, *arguments, status=status)
    assert printed == "" and message in " ".join(said.replace("│", "").split())


def test_models_with_an_encoder(command, tmp_path):
    T5Config(decoder_start_token_id=0).save_pretrained(tmp_path / "t5")
    _, said = command("check", "t5", TEXT, status=1)
    assert said == "error: check needs a model without an encoder\n"


def test_help(command):
    printed, _ = command("check", "--help")
    assert "--against" in fits(printed) and "Exit status: 0 if the models agree, 4 if" in printed
