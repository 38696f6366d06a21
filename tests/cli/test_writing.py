"""`generate`, `compile` and their messages, as a new user tries them."""

import json
import os
import re
import shutil

import pytest
import torch
from bundled import TINY_KJV
from transformers import AutoModelForCausalLM, AutoTokenizer, T5Config, T5ForConditionalGeneration

from transformers_neuronx.cli.options import Source
from transformers_neuronx.errors import InputError
from transformers_neuronx.models.sampling import ForSampling

pytestmark = pytest.mark.compiled_ahead

PROMPT = "And God said unto Moses,"


@pytest.fixture(scope="module")
def completion():
    tokenizer, model = AutoTokenizer.from_pretrained(TINY_KJV), AutoModelForCausalLM.from_pretrained(TINY_KJV)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    new = model.float().generate(ids, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :]
    return tokenizer.decode(new, skip_special_tokens=True)


def test_a_text_goes_on(command, completion):
    printed, said = command("generate", TINY_KJV, PROMPT, "-n", 16, "--top-k", 1, "--amp", "f32")
    assert printed == f"{PROMPT}{completion}\n"
    assert said.startswith("[16 tokens, ") and said.endswith(" ms]\n")
    printed, _ = command("generate", TINY_KJV, "-n", 16, "--top-k", 1, "--amp", "f32", input=PROMPT)
    assert printed == f"{PROMPT}{completion}\n"


def test_a_seed_draws_the_same_again(command):
    first, second, other = (command("generate", TINY_KJV, PROMPT, "-n", 16, "--seed", seed)[0] for seed in (1, 1, 2))
    assert first == second != other


def test_for_programs(command, completion):
    printed, said = command("generate", TINY_KJV, PROMPT, "-n", 16, "--top-k", 1, "--amp", "f32", "--json")
    facts = json.loads(printed)
    assert facts["prompt"] == PROMPT and facts["completion"] == completion and said == ""
    assert facts["metrics"]["new_tokens"] == 16 and facts["metrics"]["time_to_first_token"] > 0


def test_an_artifact_in_fewer_bits(command, tmp_path):
    printed, _ = command("compile", TINY_KJV, "artifact", "--n-positions", 64, "--quant", "s8", "--context", 32)
    assert (
        "  step_tokens32_sequences1_samples1\n" in printed
        and "saved to artifact" in printed
        and "\nweights " in printed
    )
    assert max(map(len, printed.splitlines())) <= 80
    text, _ = command("generate", "artifact", PROMPT, "-n", 8, "--top-k", 1)
    assert text.startswith(PROMPT) and len(text) > len(PROMPT) + 8
    printed, _ = command("compile", TINY_KJV, "bare", "--no-weights", "--n-positions", 64, "--json")
    facts = json.loads(printed)
    assert "step_tokens1_sequences1_samples1" in facts["programs"] and facts["weights_bytes"] == 0
    _, error = command("generate", "bare", PROMPT, status=1)
    assert "is an artifact without weights" in error


def test_how_many_tokens_fit_is_said(command, tmp_path):
    """On standard error, before they are generated, with what limits them."""
    shown, said = command("generate", TINY_KJV, PROMPT, "-n", 100_000, "--top-k", 1)
    limit, took = said.splitlines()
    assert limit == "only 506 of 100000 new tokens fit: the model takes 512 tokens in all"
    assert re.match(r"\[\d+ tokens, ", took) and shown.startswith(PROMPT)
    command("compile", TINY_KJV, "artifact", "--n-positions", 16, "--amp", "f32")
    printed, said = command("generate", "artifact", PROMPT, "-n", 11, "--top-k", 1, "--json")
    assert said == (
        "only 10 of 11 new tokens fit: the artifact takes 16 tokens in all; compile one with a larger --n-positions\n"
    )
    assert json.loads(printed)["metrics"]["new_tokens"] == 10
    _, said = command("generate", "artifact", PROMPT, "-n", 10, "--top-k", 1, "--json")
    assert said == ""


def test_a_conversation(command, tmp_path):
    shutil.copytree(TINY_KJV, tmp_path / "chat")
    tokenizer = AutoTokenizer.from_pretrained(TINY_KJV)
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
    )
    tokenizer.save_pretrained(tmp_path / "chat")
    options = ("generate", "chat", "--chat", "--system", "Be brief.", "-n", 8, "--top-k", 1, "--amp", "f32")
    printed, _ = command(*options, "--json", input="Who art thou?\n\nAnd then?\n")
    first, second = map(json.loads, printed.splitlines())
    assert (first["prompt"], second["prompt"]) == ("Who art thou?", "And then?")
    messages = [dict(role="system", content="Be brief."), dict(role="user", content="Who art thou?")]
    messages += [dict(role="assistant", content=first["completion"]), dict(role="user", content="And then?")]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    model = AutoModelForCausalLM.from_pretrained(TINY_KJV).float()
    new = model.generate(ids["input_ids"], max_new_tokens=8, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert second["completion"] == tokenizer.decode(new, skip_special_tokens=True)
    printed, said = command(*options, "Who art thou?")
    assert printed == first["completion"] + "\n" and said.count("tokens") == 2
    memory = r"weights [1-9]\d* MiB, cache [1-9]\d* MiB, peak [1-9][\d,]+ MiB"
    assert re.search(rf"^\[8 tokens in all, [1-9]\d* a second; {memory}\]$", said, re.M)
    _, said = command(*options[:-4], "-n", 3000, "--json", "Who art thou?")
    assert said.startswith("only ") and said.endswith("the model takes 512 tokens in all\n")


def test_a_conversation_has_room_beside_long_answers(command, tmp_path, monkeypatch):
    """A model that takes more gets programs larger than a usual conversation."""
    asked = []

    def fitting(self, prompt, new, **_):
        asked.append((prompt, new))
        raise InputError("enough")

    monkeypatch.setattr(Source, "fitting", fitting)
    shutil.copytree(TINY_KJV, tmp_path / "chat")
    AutoTokenizer.from_pretrained(TINY_KJV, chat_template="{{ messages }}").save_pretrained(tmp_path / "chat")
    for count in (100, 4000):
        command("generate", "chat", "--chat", "-n", count, "Hi", status=2)
    assert asked == [(1948, 100), (1024, 4000)]


def test_a_text_that_is_read(command, tmp_path):
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=1023, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, decoder_start_token_id=0,
        eos_token_id=1022,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path / "t5")
    tokenizer = AutoTokenizer.from_pretrained(TINY_KJV)
    tokenizer.save_pretrained(tmp_path / "t5")
    printed, _ = command("generate", "t5", PROMPT, "-n", 6, "--top-k", 1)
    made = model.generate(tokenizer(PROMPT, return_tensors="pt").input_ids, max_new_tokens=6, do_sample=False)
    assert printed == tokenizer.decode(made[0, 1:], skip_special_tokens=True) + "\n"


REFUSED = {
    "a name that is nowhere": (("no/such", "x"), 1, "is neither a local directory nor a hub model that is cached"),
    "a directory that is not there": (("./nothing", "x"), 1, "./nothing: no such directory, and not a valid hub name"),
    "… with a slash after it": (("nothing/", "x"), 1, "error: nothing/: no such directory, and not a valid hub name"),
    "a directory without a model": ((".", "x"), 1, "config.json: expected a regular file, found nothing"),
    "no chat template": ((TINY_KJV, "x", "--chat"), 1, "the tokenizer has no chat template; without --chat"),
    "an unknown type": ((TINY_KJV, "x", "--amp", "f12"), 2, "error: amp must be one of f32, bf16, f16, got 'f12'"),
    "bits of activations alone": ((TINY_KJV, "x", "--round-activations"), 2, "--round-activations needs --quant"),
    "a number that is none": ((TINY_KJV, "x", "--tp", "two"), 2, "Invalid value for '--tp'"),
    "an unknown option": ((TINY_KJV, "x", "--top-q", "2"), 2, "No such option: --top-q"),
    "an empty prompt": ((TINY_KJV, ""), 2, "the prompt must have 1 to"),
    "no new tokens": ((TINY_KJV, "x", "-n", 0), 2, "must be 1 or more; got 0"),
    "no devices": ((TINY_KJV, "x", "--tp", 0), 2, "Invalid value for '--tp': must be 1 or more; got 0"),
    "no temperature": ((TINY_KJV, "x", "--temperature", 0), 2, "temperature must be above 0 (for greedy"),
    "a system that nobody hears": ((TINY_KJV, "x", "--system", "y"), 2, "--system needs --chat"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_done_is_one_line(command, case):
    arguments, status, message = REFUSED[case]
    printed, said = command("generate", *arguments, status=status)
    assert printed == "" and message in said and "Traceback" not in said
    assert "Usage: " in said or said.count("\n") == 1


def without(name):
    def damage(checkpoint):
        for path in checkpoint.glob(name):
            path.unlink()

    return damage


def overwritten(name, text):
    return lambda checkpoint: (checkpoint / name).write_text(text)


DAMAGED = {
    "no tokenizer": (without("tokenizer*"), "checkpoint has no tokenizer; save one there"),
    "a tokenizer that is not JSON": (overwritten("tokenizer.json", "{"), "checkpoint: its tokenizer cannot be read ("),
    "no configuration": (without("config.json"), "checkpoint/config.json: expected a regular file, found nothing"),
    "no weights": (without("*.safetensors"), "checkpoint: no checkpoint here; expected one of model.safetensors, "),
    "half of the weights": (
        lambda checkpoint: os.truncate(checkpoint / "model.safetensors", 100_000),
        "checkpoint/model.safetensors: not a whole safetensors file",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_of_a_directory_that_lacks_something_it_is_said_what(command, tmp_path, monkeypatch, case):
    """In one line, before anything is compiled."""
    monkeypatch.setattr(ForSampling, "to_neuron", None)
    damage, message = DAMAGED[case]
    shutil.copytree(TINY_KJV, tmp_path / "checkpoint")
    damage(tmp_path / "checkpoint")
    printed, said = command("generate", "checkpoint", PROMPT, status=1)
    assert printed == "" and said.startswith(f"error: {message}") and said.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("compile", TINY_KJV, "file/artifact"),
        ("compile", TINY_KJV, "file"),
        ("inspect", TINY_KJV, "--html", "file/page.html"),
        ("inspect", TINY_KJV, "--html", "."),
        ("bench", TINY_KJV, "--plot", "file/speed.svg"),
        ("bench", TINY_KJV, "--plot", "speed.tune"),
        ("run", TINY_KJV, "--data-dir", "file", "--output", "file/x"),
        ("run", TINY_KJV, "--data-dir", "file", "--output", "file"),
    ],
    ids=lambda arguments: f"{arguments[0]} {arguments[-1]}",
)
def test_where_nothing_can_be_written_is_said_before_the_work(command, tmp_path, monkeypatch, arguments):
    monkeypatch.setattr(ForSampling, "to_neuron", None)
    (tmp_path / "file").write_text('{"prompt": "And"}')
    printed, said = command(*arguments, status=2)
    assert printed == "" and re.match(rf"error: .*{re.escape(arguments[-1])}", said) and said.count("\n") == 1
    assert (tmp_path / "file").read_text() == '{"prompt": "And"}'


def test_without_a_network_a_name_is_said_to_be_nowhere(process):
    """Online according to the settings, but no server can be reached."""
    _, said = process("generate", "no/such", "x", status=1, HF_HUB_OFFLINE="0", HF_ENDPOINT="http://127.0.0.1:9")
    assert said.count("\n") == 1 and "neither a local directory nor a hub model that is cached or reachable" in said


def test_stopped_by_the_user(command, monkeypatch):
    def stopped(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(ForSampling, "sample", stopped)
    _, said = command("generate", TINY_KJV, PROMPT, status=130)
    assert said.endswith("stopped\n") and "Traceback" not in said


def test_help_teaches_in_eighty_columns(command):
    printed, _ = command("--help")
    assert all(f"│ {name} " in printed for name in ("generate", "compile", "run"))
    for name in ("generate", "compile", "run"):
        printed, _ = command(name, "--help")
        assert "Compilation" in printed and "--amp" in printed
        assert max(map(len, printed.splitlines())) <= 80
    printed, _ = command("--version")
    assert printed.startswith("transformers-neuronx ")
    _, said = command("generat", status=2)
    assert "Did you mean 'generate'" in said
