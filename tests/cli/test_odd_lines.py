"""`run` over files with odd lines: each is used or reported, and does not affect the others."""

import json
import os
import subprocess
import sys
import tracemalloc

import pytest
from bundled import TINY_KJV
from transformers import AutoTokenizer

from transformers_neuronx.cli.prompts import Prompt, printable, read_prompts

DEEP = "[" * 100_000 + "]" * 100_000
LONG = "7" * 5_000
HALF = "\\ud83d"  # in JSON, the first half of a surrogate pair
# A line's bytes, its prompt, and the message about it.
ODD = {
    "nesting": (f'{{"prompt": "x", "more": {DEEP}}}', "too large or nested too deep to be read"),
    "digits": (f'{{"prompt": "x", "id": {LONG}}}', "a number of 5000 digits is too long to be read"),
    "half a character": (
        f'{{"prompt": "oh {HALF}"}}',
        '"prompt" must be text in UTF-8; got \\ud83d at character 4, which is not a character',
    ),
    "half a character in the key": (
        f'{{"{HALF}": 1}}',
        'must be an object with a string as "prompt"; got the keys \\ud83d',
    ),
    "bytes": (b'{"prompt": "caf\xe9"}', "not UTF-8: invalid continuation byte at byte 16"),
    "two prompts": ('{"prompt": "x", "prompt": "y"}', "'prompt' occurs twice"),
    "no text": ('{"prompt": NaN}', '"prompt" must be a string; got a number'),
    "null": ("null", 'must be an object with a string as "prompt"; got null'),
    "nothing": ("{}", 'must be an object with a string as "prompt"; got an empty one'),
    "escapes": (
        '{"\\u001b[2J": 1}',
        'must be an object with a string as "prompt"; got the keys \\x1b[2J',
    ),
    "cut short": ('{"prompt": "x', "not JSON: Unterminated string starting at at column 12"),
}
# Texts with unescaped characters that end lines in other conventions.
MARKS = ["\u2028", "\u2029", "\x85", "\x7f", "\u200b", "\ufeff"]


def bytes_of(line):
    return line if isinstance(line, bytes) else line.encode()


def records(path):
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def test_a_line_ends_with_a_line_feed_and_nowhere_else(command, tmp_path):
    """The issue's file: two prompts, which `str.splitlines` split into four lines."""
    prompts = ["And Moses\u2028said", "Thou\x85 shalt\u2029", "".join(MARKS)]
    lines = [json.dumps(dict(prompt=prompt), ensure_ascii=False) for prompt in prompts]
    (tmp_path / "data.jsonl").write_bytes("\r\n".join([*lines[:2], "", "\x0c", lines[2]]).encode())
    printed, said = command("run", TINY_KJV, "--data-dir", "data.jsonl", "--json", status=3)
    assert json.loads(printed) == dict(output="predictions.jsonl", results=3, bad=1, new_tokens=60)
    assert said == "data.jsonl, line 4: not JSON: Expecting value at column 1\n"
    made = records(tmp_path / "predictions.jsonl")
    assert [(record["line"], record.get("prompt")) for record in made] == [
        (1, prompts[0]), (2, prompts[1]), (4, None), (5, prompts[2])
    ]  # fmt: skip
    again, _ = command("run", TINY_KJV, "--data-dir", "data.jsonl", "--json", status=3)
    assert again == printed and records(tmp_path / "predictions.jsonl") == made


@pytest.mark.parametrize("kind", ["lines", "a list", "a list in one line"])
@pytest.mark.few(1)
def test_an_odd_line_costs_none_of_the_others(command, tmp_path, kind):
    good = b'{"prompt": "And Moses", "score": NaN, "more": {"a": [1, {"b": "[,]\\""}]}}'
    pieces = [good, *(bytes_of(line) for line, _ in ODD.values()), good]
    if kind != "lines":
        del pieces[list(ODD).index("cut short") + 1]  # in a list, everything after it is lost
    joined = {"lines": b"\n", "a list": b",\n ", "a list in one line": b","}[kind].join(pieces)
    path = tmp_path / ("data.jsonl" if kind == "lines" else "data.json")
    path.write_bytes(joined if kind == "lines" else b"\n[" + joined + b"]\n")
    arguments = ("run", TINY_KJV, "--data-dir", path, "--json", "--examples-to-generate", 40, "--batch-size", 2)
    printed, said = command(*arguments, status=3)
    messages = [message for _, message in ODD.values()][: len(pieces) - 2]
    assert json.loads(printed)["results"] == 2
    assert said.splitlines() == [f"{path.name}, line {number}: {text}" for number, text in enumerate(messages, 2)]
    made = records(tmp_path / "predictions.jsonl")
    assert [record.get("error") for record in made] == [None, *messages, None]
    assert made[0]["completion"] == made[-1]["completion"]
    again, _ = command(*arguments, status=3)
    assert again == printed and records(tmp_path / "predictions.jsonl") == made


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b'\xef\xbb\xbf{"prompt": "a"}\n{"prompt": "b"}', ["a", "b"]),
        (b'{"prompt": "a"}\n\xef\xbb\xbf{"prompt": "b"}\n\xef\xbb\xbf', ["a", "b"]),  # two files joined
        (b'\xef\xbb\xbf[{"prompt": "a"}, {"prompt": "b"}]', ["a", "b"]),
        (b'{\n "prompt":\n "a"}\n', ["a"]),
        (b' [ ] ', []),
        (b'[{"prompt": "a"},]', ["a", "not JSON: Expecting value at column 1"]),
        (b'[{"prompt":\n "a" 1}]', ["not JSON: Expecting ',' delimiter at column 6 of its line 2"]),
        (b'["a"]\n{"prompt": "b"}', ['must be an object with a string as "prompt"; got a list', "b"]),
        (b'{"prompt": "a"}\n{"prompt": "b', ["a", "not JSON: Unterminated string starting at at column 12"]),
        (b'{"prompt": "\\u2028\\\\"}', ["\u2028\\"]),
        (b"\xff\xfe{\x00}\x00", ["not UTF-8: invalid start byte at byte 1"]),
        (b"", []),
    ],
)  # fmt: skip
def test_a_json_file_is_a_list_or_an_object_or_lines(tmp_path, content, found):
    (tmp_path / "data.json").write_bytes(content)
    prompts = list(read_prompts(str(tmp_path / "data.json")))
    assert [prompt.error or prompt.text for prompt in prompts] == found
    assert [prompt.line for prompt in prompts] == list(range(1, len(found) + 1))


def test_of_a_long_file_no_more_is_read_than_is_asked_for(tmp_path):
    with open(tmp_path / "data.jsonl", "wb") as file:
        file.write(b'{"prompt": "a"}\n')
        file.seek(1 << 28)
        file.write(b"\n")
    tracemalloc.start()
    try:
        assert next(read_prompts(str(tmp_path / "data.jsonl"))) == Prompt("data.jsonl", 1, "a")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_texts_that_quote_and_escape_are_cut_where_they_end(tmp_path):
    """Elements that are read piece by piece are those that Python's JSON reader finds, for many lists."""
    texts = ['"', "\\", '\\"', "[", "]", "{,}", "a,b", "", "é", "\u2028", '"],["', "\\\\"]
    lists = [[dict(prompt=one + other, k=[one, {other: [one]}]) for one in texts] for other in texts]
    for number, objects in enumerate(lists):
        path = tmp_path / f"{number}.json"
        for indent in (None, 1):
            path.write_text(json.dumps(objects, ensure_ascii=bool(number % 2), indent=indent), encoding="utf-8")
            assert [prompt.text for prompt in read_prompts(str(path))] == [each["prompt"] for each in objects]
    whole = tmp_path / "all.json"
    whole.write_text("".join(json.dumps(objects[0]) + "\n" for objects in lists))
    assert len(list(read_prompts(str(whole)))) == len(lists)


@pytest.mark.skipif(sys.platform != "linux", reason="names of files are bytes on Linux alone")
def test_a_file_whose_name_is_no_text(command, tmp_path):
    folder = tmp_path / "prompts"
    folder.mkdir()
    with open(os.fsencode(folder) + b"/caf\xe9\x1b.jsonl", "wb") as file:
        file.write(b'{"prompt": "And"}\n{}\n')
    arguments = ("run", TINY_KJV, "--data-dir", folder, "--json")
    printed, said = command(*arguments, status=3)
    assert json.loads(printed)["results"] == 1 and said.startswith("caf\\udce9\\x1b.jsonl, line 2: must be")
    made = records(tmp_path / "predictions.jsonl")
    assert [record["file"] for record in made] == ["caf\udce9\x1b.jsonl"] * 2
    assert command(*arguments, status=3)[0] == printed and len(records(tmp_path / "predictions.jsonl")) == 2


@pytest.fixture
def without_a_token(tmp_path, monkeypatch):
    """The bundled checkpoint, with a tokenizer that has a token the model lacks, and fails on another word."""
    from transformers import PreTrainedTokenizerFast

    for path in TINY_KJV.iterdir():
        (tmp_path / path.name).symlink_to(path)
    for path in tmp_path.glob("tokenizer*"):
        path.unlink()
    tokenizer = AutoTokenizer.from_pretrained(TINY_KJV)
    tokenizer.add_tokens(["<beyond>"])
    tokenizer.save_pretrained(tmp_path)
    call = PreTrainedTokenizerFast.__call__

    def failing(self, text, *arguments, **options):
        if "fail" in text:
            raise RuntimeError("no such\nword")
        return call(self, text, *arguments, **options)

    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", failing)
    return tmp_path


def test_a_prompt_that_the_tokenizer_or_the_model_does_not_take(command, without_a_token):
    lines = "".join(f'{{"prompt": "{text}"}}\n' for text in ("And", "<beyond>", "fail", "Thou"))
    (without_a_token / "data.jsonl").write_text(lines)
    printed, said = command("run", without_a_token, "--data-dir", "data.jsonl", "--json", status=3)
    assert json.loads(printed)["results"] == 2
    assert said.splitlines() == [
        "data.jsonl, line 2: the tokenizer gives token 1023, and the model has 1023 tokens",
        "data.jsonl, line 3: the tokenizer cannot encode it: no such\\nword",
    ]


def test_a_line_that_was_mended_is_not_passed_over(command, tmp_path):
    """A bad line has a record. Once it is fixed, a run must not end as if all were done."""
    (tmp_path / "data.jsonl").write_text('{"prompt": "And Moses"}\n{oops}\n')
    arguments = ("run", TINY_KJV, "--data-dir", "data.jsonl", "--json", "--max-seq-length", 64)
    command(*arguments, status=3)
    (tmp_path / "data.jsonl").write_text('{"prompt": "And Moses"}\n{"prompt": "Thou"}\n')
    _, said = command(*arguments, status=2)
    assert "has a result for another prompt in data.jsonl, line 2. --restart starts over" in said
    printed, _ = command(*arguments, "--restart")
    assert json.loads(printed)["results"] == 2


def test_what_cannot_be_printed_is_escaped():
    assert printable("é\u2028\x1b\ud800\n'") == "é\\u2028\\x1b\\ud800\\n'"


NOT_UTF8 = "must be text in UTF-8; got \\udce9 at character 4, which is not a character\n"
CAFE = os.fsdecode(b"caf\xe9")


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("generate", TINY_KJV, CAFE), "PROMPT"),
        (("check", TINY_KJV, CAFE), "TEXT"),
        (("generate", "chat", CAFE, "--chat"), "a line"),
        (("generate", "chat", "Hi", "--chat", "--system", CAFE), "--system"),
    ],
)
def test_arguments_that_are_not_utf8(command, tmp_path, arguments, what):
    (tmp_path / "chat").mkdir()
    for path in TINY_KJV.iterdir():
        if "tokenizer" not in path.name:
            (tmp_path / "chat" / path.name).symlink_to(path)
    AutoTokenizer.from_pretrained(TINY_KJV, chat_template="{{ messages }}").save_pretrained(tmp_path / "chat")
    _, said = command(*arguments, status=2)
    assert said == f"error: {what} {NOT_UTF8}"


@pytest.mark.slow
def test_inputs_and_outputs_that_are_not_utf8(tmp_path):
    """Characters that an output cannot encode are escaped."""
    arguments = [sys.executable, "-m", "transformers_neuronx"]
    environment = os.environ | dict(PYTHONPATH=str(TINY_KJV.parents[1]), PYTHONIOENCODING="ascii", HF_HUB_OFFLINE="1")
    options = dict(cwd=tmp_path, env=environment, capture_output=True)
    ran = subprocess.run([*arguments, "generate", TINY_KJV, "caf\u00e9", "-n", "2"], **options)
    assert ran.returncode == 0 and ran.stdout.startswith(b"caf\\xe9")
    options["env"] |= dict(PYTHONIOENCODING="utf-8:strict")
    ran = subprocess.run([*arguments, "generate", TINY_KJV], input=b"caf\xe9", **options)
    assert ran.returncode == 2 and ran.stderr.decode() == f"error: PROMPT {NOT_UTF8}"
