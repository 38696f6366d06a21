"""`generate` and `run` sample as a checkpoint's generation_config.json says, unless options override it."""

import json

import pytest
import torch
from bundled import TINY_KJV
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPT = "And God said unto Moses,"
COUNT = 24
NEUTRAL = dict(top_k=50, top_p=1.0, temperature=1.0, min_p=0.0, repetition_penalty=1.0)
GREEDY = NEUTRAL | dict(top_k=1)
CHAT = dict(do_sample=True, temperature=0.6, top_k=20, top_p=0.95, min_p=0.05, repetition_penalty=1.1)  # a chat model's
COMMA = AutoTokenizer.from_pretrained(TINY_KJV)(",").input_ids[0]


@pytest.fixture
def checkpoint(tmp_path):
    """Return the path of the bundled checkpoint with these values in its generation_config.json."""

    def made(name="checkpoint", **generation):
        (tmp_path / name).mkdir()
        for path in TINY_KJV.iterdir():
            if path.name != "generation_config.json":
                (tmp_path / name / path.name).symlink_to(path)
        if generation:
            (tmp_path / name / "generation_config.json").write_text(json.dumps(dict(eos_token_id=1022) | generation))
        return name

    return made


@pytest.fixture
def rules(command, tmp_path):
    """The sampling settings that a run records, and what it writes to standard error."""
    (tmp_path / "data.jsonl").write_text(json.dumps(dict(prompt=PROMPT)))

    def recorded(checkpoint, *options, status=0):
        arguments = ("--data-dir", "data.jsonl", "--max-tokens-to-generate", 1, "--json", "--restart")
        _, said = command("run", checkpoint, *arguments, *options, status=status)
        if status:
            return None, said
        found = json.loads((tmp_path / "predictions.jsonl.settings.json").read_text())["rules"]
        assert found.pop("seed") == 0
        return found, said

    return recorded


def completions(command, checkpoint, *options):
    """The completions of `generate` and of `run`."""
    written, _ = command("generate", checkpoint, PROMPT, "-n", COUNT, "--amp", "f32", "--json", *options)
    run = ("--data-dir", "prompt.jsonl", "--max-tokens-to-generate", COUNT, "--amp", "f32", "--json", "--restart")
    with open("prompt.jsonl", "w") as file:
        json.dump(dict(prompt=PROMPT), file)
    command("run", checkpoint, *run, *options)
    with open("predictions.jsonl") as file:
        return json.loads(written)["completion"], json.load(file)["completion"]


def transformers(checkpoint):
    """The completion of Transformers' `generate`, which reads generation_config.json itself."""
    tokenizer, model = AutoTokenizer.from_pretrained(checkpoint), AutoModelForCausalLM.from_pretrained(checkpoint)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    with torch.inference_mode():
        new = model.float().generate(ids, max_new_tokens=COUNT, pad_token_id=1022)[0, ids.shape[1] :]
    return tokenizer.decode(new, skip_special_tokens=True)


@pytest.mark.parametrize(
    "generation",
    [
        pytest.param(dict(do_sample=False), marks=pytest.mark.slow),
        dict(do_sample=False, temperature=0.0, top_p=0.5),  # which Transformers ignores
        pytest.param(dict(repetition_penalty=1.3), marks=pytest.mark.slow),
        dict(do_sample=False, repetition_penalty=1.3, eos_token_id=[1022, COMMA]),
        pytest.param(dict(do_sample=True, top_k=1), marks=pytest.mark.slow),
        dict(do_sample=True, top_p=1e-6),
        pytest.param(dict(do_sample=True, temperature=1e-3), marks=pytest.mark.slow),
        dict(do_sample=True, min_p=1.0, top_k=0),
        dict(do_sample=True, top_k=1, repetition_penalty=1.3),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore")  # Transformers' own, about values that it ignores
@pytest.mark.few(2)
def test_what_it_says_is_what_transformers_makes_of_it(command, checkpoint, tmp_path, generation):
    """If only one token can be drawn, it is the same one."""
    path = checkpoint(**generation)
    expected = transformers(tmp_path / path)
    assert completions(command, path) == (expected, expected)


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        (CHAT, {name: CHAT[name] for name in NEUTRAL}),
        (dict(do_sample=True), NEUTRAL),
        (dict(do_sample=True, temperature=None, top_k=0), NEUTRAL | dict(top_k=0)),
        (dict(do_sample=False), GREEDY),
        (dict(temperature=0.7, top_p=0.9), GREEDY),
        (CHAT | dict(do_sample=False), GREEDY | dict(repetition_penalty=1.1)),
        (dict(), GREEDY),  # no file
        (dict(eos_token_id=1022), GREEDY),
    ],
)
@pytest.mark.few(2)
def test_the_settings_of_a_run_say_what_it_went_by(checkpoint, rules, generation, expected):
    assert rules(checkpoint(**generation)) == (expected, "")


@pytest.mark.parametrize(
    ("generation", "options", "expected"),
    [
        (CHAT, ("--temperature", 1.5), dict(temperature=1.5)),
        (CHAT, ("--top-k", 1), dict(top_k=1)),
        (CHAT, ("--top-p", 0.5, "--min-p", 0), dict(top_p=0.5, min_p=0.0)),
        (CHAT, ("--repetition-penalty", 1), dict(repetition_penalty=1.0)),
        (CHAT | dict(do_sample=False), ("--top-k", 7), dict(top_k=7)),  # the option turns sampling on
    ],
)
@pytest.mark.few(2)
def test_options_win(checkpoint, rules, generation, options, expected):
    assert rules(checkpoint(**generation), *options) == ({name: CHAT[name] for name in NEUTRAL} | expected, "")


@pytest.mark.slow
def test_without_a_word_of_it_the_commands_do_as_they_did(command, checkpoint, tmp_path):
    """`generate` samples, and `run` is greedy."""
    path = checkpoint()
    drawn, likeliest = completions(command, path, "--seed", 1)
    expected = transformers(tmp_path / path)
    assert drawn != expected and likeliest == expected
    assert completions(command, path, "--seed", 1, "--top-k", 50) == (drawn, drawn)


def test_what_is_drawn_is_as_sample_draws_it(command, checkpoint):
    """Numbers in the file have the same effect as the same numbers as options."""
    options = [part for name in NEUTRAL for part in (f"--{name.replace('_', '-')}", CHAT[name])]
    from_file = completions(command, checkpoint("chat", **CHAT), "--seed", 3)
    assert from_file == completions(command, checkpoint("plain"), "--seed", 3, *options)
    assert from_file != completions(command, checkpoint("other", **CHAT | dict(temperature=3.0)), "--seed", 3)


@pytest.mark.compiled_ahead
@pytest.mark.slow
def test_an_artifact_has_it_too(command, checkpoint, tmp_path, rules):
    command("compile", checkpoint("chat", **CHAT, eos_token_id=[1022, COMMA]), "artifact", "--n-positions", 64)
    assert rules("artifact") == ({name: CHAT[name] for name in NEUTRAL}, "")
    printed, _ = command("generate", "artifact", PROMPT, "--top-k", 1, "--repetition-penalty", 1, "--json")
    completion = json.loads(printed)["completion"]
    assert completion.count(",") == 1 and completion.endswith(",")
    command("compile", "artifact", "again")
    assert rules("again") == ({name: CHAT[name] for name in NEUTRAL}, "")
    command("compile", checkpoint("plain"), "again", "--n-positions", 32)  # replaces the artifact
    assert rules("again") == (GREEDY, "") and not (tmp_path / "again" / "generation_config.json").exists()


WRONG = {
    "temperature": (dict(do_sample=True, temperature=0.0), "temperature must be above 0", ("--temperature", 1)),
    "top_p": (dict(do_sample=True, top_p="0.9"), "top_p must be in (0, 1], got 0.9", ("--top-p", 1)),
    "top_k": (dict(do_sample=True, top_k=[5]), "top_k must be one number, got [5]", ("--top-k", 5)),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_it_cannot_say(checkpoint, rules, case):
    """The checkpoint is at fault, unless an option overrides it."""
    generation, message, option = WRONG[case]
    path = checkpoint(**generation)
    _, said = rules(path, status=1)
    assert said.startswith(f"error: checkpoint, generation_config.json: {message}") and said.count("\n") == 1
    assert said.endswith("; an option of that name overrides it\n")
    found, said = rules(path, *option)
    assert found[case] == option[1] and said == ""
    _, said = rules(path, "--min-p", 2, *option, status=2)
    assert said == "error: min_p must be in [0, 1], got 2.0\n"


def test_what_is_asked_for_and_not_done_is_said(checkpoint, rules):
    path = checkpoint(num_beams=4, no_repeat_ngram_size=3, typical_p=1.0, min_length=0, stop_strings=["\x1b[2J"])
    found, said = rules(path)
    assert found == GREEDY and said == (
        "generation_config.json also has num_beams=4, no_repeat_ngram_size=3, stop_strings=['\\x1b[2J'], which this "
        "command ignores\n"
    )


def test_options_that_change_nothing_are_named(checkpoint, rules):
    _, said = rules(checkpoint(), "--temperature", 0.7, "--min-p", 0.1)
    assert said == "--min-p, --temperature: no effect, as the choice is greedy; --top-k 50 would sample\n"


def test_help_says_where_defaults_come_from(command):
    for name, top_k in (("generate", 50), ("run", 1)):
        printed, _ = command(name, "--help")
        assert (
            f"(the checkpoint's, or {top_k})" in printed and "--min-p" in printed and "--repetition-penalty" in printed
        )
        assert max(map(len, printed.splitlines())) <= 80
