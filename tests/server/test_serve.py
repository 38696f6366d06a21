"""`transformers-neuronx serve` in a process of its own."""

import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from openai import OpenAI

from transformers_neuronx.cli.serve import named

TINY_KJV = Path(__file__).parents[2] / "examples" / "tiny-kjv"
SERVE = [sys.executable, "-m", "transformers_neuronx", "serve", str(TINY_KJV), "--port", "0", "--n-positions", "256"]


@contextmanager
def serving(*options):
    """A server's process, and a client of it."""
    names = ["--served-model-name", "kjv", "--api-key", "secret", "--batch-size", "2"]
    process = subprocess.Popen([*SERVE, *names, *options], stderr=subprocess.PIPE, text=True)
    try:
        lines = []
        while not (found := re.search(r"http://\S+", lines[-1] if lines else "")):
            lines.append(process.stderr.readline())
            assert lines[-1], "".join(lines)
        yield process, OpenAI(base_url=f"{found[0]}/v1", api_key="secret", max_retries=0)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_it_serves_until_it_is_told_to_stop():
    with serving() as (process, client):
        stream = client.completions.create(
            model="kjv", prompt="In the beginning", max_tokens=200, stream=True, extra_body=dict(ignore_eos=True)
        )
        next(iter(stream))
        process.send_signal(signal.SIGTERM)
        assert [*stream][-1].choices[0].finish_reason == "length", "what runs may end"
        assert process.wait(60) == 0
        assert "Traceback" not in process.stderr.read()


EAGLE, SMALL = (str(TINY_KJV.with_name(name)) for name in ("tiny-kjv-eagle", "tiny-kjv-draft"))


@pytest.mark.slow
@pytest.mark.parametrize("draft", [EAGLE, "text", SMALL])
def test_drafts(draft):
    """Where draft tokens do not pay, each row has one again after 64 tokens: see `drafting.TRIED`."""
    prompt = "And the LORD said unto Moses, And the LORD said unto"
    with serving("--draft", draft, "--draft-tokens", "3") as (_, client):
        answer = client.completions.create(
            model="kjv", prompt=prompt, max_tokens=200, temperature=0, extra_body=dict(ignore_eos=True)
        )
        page = Request(str(client.base_url).replace("/v1/", "/metrics"), headers=dict(Authorization="Bearer secret"))
        metrics = urlopen(page).read().decode()
    drafted, accepted = (
        float(re.search(rf"^transformers_neuronx_{name}draft_tokens_total\S* (\S+)$", metrics, re.M)[1])
        for name in ("", "accepted_")
    )
    assert answer.usage.completion_tokens == 200 and drafted > 0 and drafted >= accepted >= 0


def test_a_draft_that_is_not_there(command):
    error = command("serve", str(TINY_KJV), "--draft", "/no/such/draft", status=1)[1]
    assert "/no/such/draft: no such directory" in error and "compiled" not in error


def test_a_draft_is_for_one_model(command):
    options = ["x=a", "y=b", "--draft", "text"]
    assert "a draft is for one model" in command("serve", *options, status=2)[1]


@pytest.mark.parametrize(
    ("models", "names", "found"),
    [
        (["a"], None, {"a": ["a"]}),
        (["a"], ["b", "c"], {"a": ["b", "c"]}),
        (["a=b"], None, {"b": ["a"]}),
        (["x=a", "b", "y=a"], None, {"a": ["x", "y"], "b": ["b"]}),
    ],
)
def test_names_of_models(models, names, found):
    assert named(models, names) == found


def test_a_path_may_have_an_equals_sign(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "step=3").mkdir()
    assert named(["step=3", "x=step=3"], None) == {"step=3": ["step=3", "x"]}


def test_names_that_could_mean_two_models(command):
    assert "two models have the name 'x'" in command("serve", "x=a", "x=b", status=2)[1]
    assert "for one model" in command("serve", "x=a", "y=b", "--served-model-name", "z", status=2)[1]


def test_importing_the_package_imports_no_web_server():
    script = """
import sys, transformers_neuronx.cli
assert not {"starlette", "uvicorn", "msgspec", "httptools"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", script], check=True, env=os.environ)


def test_without_its_packages_it_says_what_to_install():
    script = """
import sys
sys.modules["starlette.applications"] = None
from transformers_neuronx.cli import main
main()
"""
    ran = subprocess.run([sys.executable, "-c", script, "serve", "nowhere"], capture_output=True, text=True)
    assert ran.returncode == 2 and 'pip install "transformers-neuronx[serve]"' in ran.stderr
