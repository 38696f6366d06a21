"""A command exits with 2 if it is wrong, and with 1 if a checkpoint, a file or the machine is."""

import json
import shutil
import sys

import pytest
from bundled import TINY_KJV
from transformers import AutoTokenizer, T5Config, WhisperConfig

from transformers_neuronx.models.sampling import ForSampling

pytestmark = pytest.mark.compiled_ahead

SMALL = ("--n-positions", 64)
COMMANDS = {
    "generate": ("generate", TINY_KJV, "And"),
    "run": ("run", TINY_KJV, "--data-dir", "data.jsonl"),
    "bench": ("bench", TINY_KJV, "--new", 2, "--prompt", 2, "--rounds", 1),
    "check": ("check", TINY_KJV, "And"),
    "compile": ("compile", TINY_KJV, "artifact", *SMALL),
    "inspect": ("inspect", TINY_KJV, *SMALL),
    "plan": ("plan", TINY_KJV, *SMALL),
    "lint": ("lint", TINY_KJV, *SMALL),
}
HUGE = 10**30
EVERY = [
    ("--amp", "f12"), ("--quant", "s3"), ("--round-activations",), ("--tp", 0), ("--tp", 1000), ("--tp", HUGE),
    ("--tp", "two"), ("--no-such-option",),
]  # fmt: skip
RUNTIME = ["generate", "run", "bench", "check", "compile", "inspect"]
SAMPLING = [
    ("--top-k", -1), ("--top-k", HUGE), ("--top-p", 0), ("--top-p", 1.5), ("--top-p", "nan"), ("--temperature", 0),
    ("--temperature", "nan"), ("--temperature", "inf"), ("--seed", -1),
]  # fmt: skip
OWN = {
    "generate": [("-n", 0), ("-n", HUGE), ("--system", "x")],
    "run": [
        ("--max-seq-length", 0), ("--max-seq-length", -5), ("--max-seq-length", 5000),
        ("--max-tokens-to-generate", 512), ("--max-tokens-to-generate", HUGE), ("--examples-to-generate", 0),
        ("--examples-to-generate", HUGE), ("--batch-size", 0), ("--output", "."), ("--output", "data.jsonl"),
    ],
    "bench": [
        ("-b", 0), ("-b", HUGE), ("--prompt", 0), ("--prompt", 5000), ("--new", 0), ("--new", 5000), ("--rounds", 0),
        ("--plot", "speed.tune"), ("--plot", "."),
    ],
    "check": [
        ("-n", -1), ("-n", 600), ("--tolerance", -1), ("--tolerance", "nan"), ("--against", "dtype=f32"),
        ("--against", "tp=two"), ("--against", "tp=1000"), ("--against", "amp=f12"), ("--against", "quant=s3"),
        ("--against", "hf", "--against", "amp=f12"), ("--against", "hf", "--against", "tp=2"),
        ("--against", "runtime=tpu"), ("--against", "a", "--against", "b"),
    ],
    "compile": [("--context", 0), ("--context", 65), ("--n-positions", 0), ("--n-positions", 513), ("--batch-size", 0)],
    "inspect": [("--hlo", "nothing"), ("--html", "."), ("--n-positions", 513)],
    "plan": [("--instance", "p4d"), ("--context", 65), ("--n-positions", 513)],
    "lint": [("--target", "trn9"), ("--context", 65), ("--n-positions", 513)],
}  # fmt: skip
WRONG = [(name, *wrong) for name in COMMANDS for wrong in [*EVERY, *OWN[name]]]
WRONG += [(name, "--runtime", "tpu") for name in RUNTIME]
WRONG += [(name, *wrong) for name in ("generate", "run") for wrong in SAMPLING]


@pytest.fixture(autouse=True)
def data(tmp_path):
    (tmp_path / "data.jsonl").write_text('{"prompt": "And"}\n')


@pytest.mark.parametrize("case", WRONG, ids=lambda case: " ".join(map(str, case)))
def test_a_wrong_option_is_2(command, tmp_path, case):
    """Nothing is written then."""
    name, *wrong = case
    printed, said = command(*COMMANDS[name], *wrong, status=2)
    assert printed == "" and "Traceback" not in said
    assert "Usage: " in said or (said.startswith("error: ") and said.count("\n") == 1)
    assert [path.name for path in tmp_path.iterdir()] == ["data.jsonl"]


COMPILED = ("compile", TINY_KJV, "artifact", "--n-positions", 64, "--amp", "f32")
ARGUMENTS = {
    "no command": (("generat",), "No such command"),
    "no prompt": (("generate", TINY_KJV, ""), "the prompt must have 1 to 127 tokens, got 0"),
    "a prompt that is too long": (("generate", TINY_KJV, "word " * 600), "the prompt must have 1 to 511 tokens"),
    "no model": (("run", "--data-dir", "data.jsonl"), "expected a MODEL"),
    "no data": (("run", TINY_KJV), "Missing option '--data-dir'"),
    "a checkpoint as ARTIFACT": (
        ("compile", TINY_KJV, TINY_KJV),
        "is a checkpoint; save the artifact to a separate directory",
    ),
    "a file as ARTIFACT": (("compile", TINY_KJV, "data.jsonl"), "cannot write a directory, found a file"),
    "another type than an artifact's": (("generate", "artifact", "And", "--amp", "bf16"), "saved f32, expected bf16"),
    "another degree": (("check", "artifact", "And", "--against", "tp=2"), "tp_degree: saved 1, expected 2"),
    "an artifact beside Transformers": (("check", "artifact", "And"), "add --against PATH with its checkpoint or"),
    "weights for an artifact that has some": (
        ("run", "artifact", "--data-dir", "data.jsonl", "--checkpoint-name", TINY_KJV),
        "has its own weights",
    ),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_wrong_arguments_and_what_does_not_go_together_are_2(command, case):
    arguments, message = ARGUMENTS[case]
    if "artifact" in arguments:
        command(*COMPILED)
    printed, said = command(*arguments, status=2)
    assert printed == "" and message in " ".join(said.replace("│", "").split())


@pytest.mark.parametrize("more", [("--top-k", 2), ("--data-dir", "other/data.jsonl")])
def test_results_of_other_settings_and_prompts_are_2(command, tmp_path, more):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "data.jsonl").write_text('{"prompt": "Thou"}\n')
    command(*COMMANDS["run"])
    command(*COMMANDS["run"], *more, status=2)


def edited(**changes):
    def edit(checkpoint):
        config = json.loads((TINY_KJV / "config.json").read_text()) | changes
        (checkpoint / "config.json").write_text(
            json.dumps({name: config[name] for name in config if config[name] != ""})
        )

    return edit


CHECKPOINTS = {
    "of no family": (edited(model_type="mamba"), "model_type 'mamba' is not supported"),
    "of no type": (edited(model_type=""), "has no model_type"),
    "with what is not supported": (edited(activation_function="quux"), "supported: "),
    "with what Transformers refuses": (edited(n_layer="six"), "n_layer"),
    "damaged": (lambda checkpoint: (checkpoint / "config.json").write_text("{"), "not valid JSON"),
}


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("case", CHECKPOINTS)
def test_a_checkpoint_that_is_not_supported_is_1(command, tmp_path, name, case):
    change, message = CHECKPOINTS[case]
    shutil.copytree(TINY_KJV, tmp_path / "checkpoint")
    change(tmp_path / "checkpoint")
    _, said = command(name, "checkpoint", *COMMANDS[name][2:], status=1)
    assert said.startswith("error: ") and message in said and said.count("\n") == 1


def test_files_that_are_not_there_are_1(command, tmp_path):
    for arguments in (
        ("generate", "./nothing", "And"),
        ("run", TINY_KJV, "--data-dir", "nothing.jsonl"),
        ("run", TINY_KJV, "--data-dir", tmp_path / "data.jsonl", "--checkpoint-name", "./nothing"),
        ("check", TINY_KJV, "And", "--against", "./nothing"),
    ):
        _, said = command(*arguments, status=1)
        assert "nothing" in said
    (tmp_path / "data.jsonl").write_text("")
    _, said = command(*COMMANDS["run"], status=1)
    assert "has no prompts" in said


def test_what_a_model_or_a_machine_lacks_is_1(command, tmp_path, monkeypatch):
    _, said = command(*COMMANDS["generate"][:2], "--chat", status=1)
    assert "the tokenizer has no chat template" in said
    T5Config(decoder_start_token_id=0).save_pretrained(tmp_path / "t5")
    _, said = command("check", "t5", status=1)
    assert "without an encoder" in said
    WhisperConfig(num_mel_bins=20, max_source_positions=50).save_pretrained(tmp_path / "whisper")
    for name in ("generate", "serve", "bench"):
        _, said = command(name, "whisper", *COMMANDS.get(name, ())[2:], status=1)
        assert said.startswith(
            "error: whisper reads numbers, [20, 100] for each source, and commands give text; use Whi"
        )
    command(*COMPILED, "--no-weights")
    for arguments in (("generate", "artifact", "And"), ("run", "artifact", "--data-dir", "data.jsonl")):
        _, said = command(*arguments, status=1)
        assert said == "error: artifact is an artifact without weights: compile one with --weights\n"
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    _, said = command(*COMMANDS["bench"], "--plot", "speed.svg", status=1)
    assert "pip install" in said


def test_a_conversation_that_grows_too_long_is_1(command, tmp_path):
    shutil.copytree(TINY_KJV, tmp_path / "chat")
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    AutoTokenizer.from_pretrained(TINY_KJV, chat_template=template).save_pretrained(tmp_path / "chat")
    lines = "And God said unto Moses, " * 40
    command("generate", "chat", "--chat", "-n", 2, lines * 3, status=2)
    printed, said = command("generate", "chat", "--chat", "-n", 2, input=f"{lines}\n{lines}\n{lines}", status=1)
    assert printed and "the conversation has " in said and said.endswith("the model takes 511: start a new one\n")


def test_memory_that_is_not_enough_is_1(command, monkeypatch):
    def sample(*_, **__):
        raise MemoryError("Unable to allocate 26.1 GiB")

    monkeypatch.setattr(ForSampling, "sample", sample)
    _, said = command(*COMMANDS["generate"], status=1)
    assert said == "error: not enough memory: Unable to allocate 26.1 GiB\n"


def test_before_anything_is_compiled(command, monkeypatch):
    """Errors in the options alone are found before the model is loaded onto a device."""
    monkeypatch.setattr(ForSampling, "to_neuron", None)
    monkeypatch.setattr(ForSampling, "cpu_compile", None)
    cases = [("run", "--max-tokens-to-generate", 512), ("bench", "--new", 5000), ("check", "-n", 600)]
    for name, *wrong in cases:
        command(*COMMANDS[name], *wrong, status=2)


def test_the_help_says_what_they_mean(command):
    printed, _ = command("--help")
    assert "Exit status: 0 success, 1 failure, 2 wrong usage" in " ".join(printed.split())
    assert max(map(len, printed.splitlines())) <= 80


@pytest.mark.parametrize("content", ["{}", '{"model_type": "gpt2"}', '{"model_type": "gpt2", "n_embd": "x"}'])
def test_an_artifact_whose_configuration_is_damaged_is_1(command, tmp_path, content):
    command(*COMPILED)
    (tmp_path / "artifact" / "config.json").write_text(content)
    _, said = command("generate", "artifact", "And", status=1)
    assert said.startswith("error: ") and "artifact" in said and said.count("\n") == 1
