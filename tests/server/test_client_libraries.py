"""Programs that others wrote for OpenAI's interface, in an environment of their own: LangChain, LiteLLM and lm-eval."""

import itertools
import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT, HERE = Path(__file__).parents[2], Path(__file__).parent
TINY_KJV = ROOT / "examples" / "tiny-kjv"
PYTHON = ROOT / ".venv-clients" / "bin" / "python"
PROMPTS = ["And the LORD said unto Moses,", "In the beginning"]
GREEDY = dict(model="tiny-kjv", temperature=0)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs .venv-clients, which `make test-all` makes"),
]


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """`told(script, *arguments)`: what a script prints, the last line of which is JSON. Its directory has `files`."""

    def ran(script, *arguments, **files):
        home = tmp_path_factory.mktemp("client")
        for name, rows in files.items():
            (home / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        # Nothing of the user's: keys, proxies, caches, services that record what clients do. LiteLLM would download
        # a list of prices.
        environment = dict(PATH=os.environ["PATH"], HOME=home, HF_HUB_OFFLINE="1", LITELLM_LOCAL_MODEL_COST_MAP="True")
        environment["OMP_NUM_THREADS"] = "1"  # torch's threads would spin on the cores that the server needs
        command = [PYTHON, HERE / "client_scripts" / script, *arguments]
        done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, timeout=1800)
        assert done.returncode == 0, done.stderr[-5000:]
        return json.loads(done.stdout.splitlines()[-1])

    return ran


@pytest.fixture(scope="module")
def chats(client):
    """The answers of chats with the prompts, as OpenAI's client has them."""
    return [
        client.chat.completions.create(messages=[dict(role="user", content=prompt)], max_tokens=12, **GREEDY)
        for prompt in PROMPTS
    ]


@pytest.fixture(scope="module")
def texts(client):
    """The completions of the prompts, as OpenAI's client has them."""
    return [choice.text for choice in client.completions.create(prompt=PROMPTS, max_tokens=12, **GREEDY).choices]


@pytest.fixture(scope="module")
def langchain(told, url):
    return told("langchain_client.py", url, *PROMPTS)


def test_langchain_chats(langchain, chats):
    wanted, found = [chat.choices[0].message.content for chat in chats], langchain["chats"]
    used = chats[0].usage
    assert found["answer"] == found["stream"] == found["async_answer"] == wanted[0] and found["batch"] == wanted
    assert found["tokens"] == found["stream_tokens"] == [used.prompt_tokens, used.completion_tokens]
    assert found["reason"] == "length"
    tokens, logprobs, likeliest = zip(*found["scored"], strict=True)
    assert "".join(tokens) == wanted[0] and max(logprobs) < 0 and {*likeliest} == {2}


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_objects_of_a_schema(langchain, method):
    town = langchain["towns"][method]
    assert town.keys() == {"name", "kind", "gates"}
    assert len(town["name"]) <= 8 and town["kind"] in ("city", "village") and 1 <= town["gates"] <= 9


@pytest.mark.parametrize(("choice", "reason"), [("Weather", "stop"), ("any", "tool_calls")])
def test_langchain_calls_of_tools(langchain, choice, reason):
    found = langchain["calls"][choice]
    [(name, arguments)] = found["called"]
    assert name == "Weather" and arguments.keys() == {"city", "days"}
    assert len(arguments["city"]) <= 8 and 1 <= arguments["days"] <= 9
    assert found["streamed"] == found["called"] and found["reason"] == reason and found["after"]


def test_langchain_completions(langchain, texts):
    found = langchain["texts"]
    assert found["one"] == found["stream"] == texts[0] and found["both"] == texts


def test_langchain_errors(langchain):
    assert (
        "NotFoundError" in langchain["errors"]["model"]
        and "OpenAIContextOverflowError" in langchain["errors"]["prompt"]
    )


class EveryOther:
    """True, then false, then true, and so on."""

    def __init__(self):
        self._values = itertools.cycle([True, False])

    def __bool__(self):
        return next(self._values)


@pytest.fixture(scope="module")
def busy(started):
    """A server that refuses every other request."""
    running = started()
    running.server.draining = EveryOther()
    return running


@pytest.fixture(scope="module")
def litellm(told, url, busy):
    return told("litellm_client.py", url, busy.address(), *PROMPTS)


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellm(litellm, busy, chats, texts, provider):
    found, used, wanted = litellm[provider]["chats"], chats[0].usage, chats[0].choices[0].message.content
    assert {found[name] for name in ("answer", "stream", "async_answer", "async_stream")} == {wanted}
    assert found["tokens"] == found["stream_tokens"] == [used.prompt_tokens, used.completion_tokens]
    assert found["reason"] == "length"
    assert litellm[provider]["texts"] == dict(one=texts[0], stream=texts[0], both=texts)
    assert busy.server.statuses[503] == busy.server.statuses[200] == 14, "each request was sent again"


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellm_errors(litellm, provider):
    found = litellm[provider]["errors"]
    assert found["model"] == "NotFoundError"
    assert {found["prompt"], found["tokens"]} == {"ContextWindowExceededError"}


def verses():
    """Beginnings of held-out verses, each with four words, one of which ends it."""
    beginnings = {}
    for line in (TINY_KJV / "heldout.txt").read_text().splitlines():
        beginning, _, word = line.rpartition(" ")
        if 60 < len(beginning) < 200:
            beginnings.setdefault(word, beginning)
    words = [*beginnings][:24]
    for place, word in enumerate(words):
        group = place - place % 4
        yield dict(beginning=beginnings[word], words=words[group : group + 4], right=place - group)


def chapters():
    """Held-out chapters that are not too long."""
    for chapter in (TINY_KJV / "heldout.txt").read_text().split("<|endoftext|>"):
        if 0 < len(chapter) < 2000:
            yield dict(text=chapter)


@pytest.fixture(scope="module")
def lm_eval(told, url, engine):
    rows = dict(verses=[*verses()], chapters=[*chapters()])
    return told("lm_eval_client.py", url, TINY_KJV, HERE / "lm_eval_tasks", str(engine.longest), **rows)


BACKENDS = ["huggingface", "remote"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_lm_eval_choices(lm_eval, backend):
    wanted, found = lm_eval["hf"]["kjv_last_word"], lm_eval[backend]["kjv_last_word"]
    for name in ("acc", "acc_norm", "exact_match"):
        assert 0 < wanted["metrics"][f"{name},none"] == found["metrics"][f"{name},none"] < 1
    assert found["metrics"]["brier_score,none"] == pytest.approx(wanted["metrics"]["brier_score,none"], rel=1e-4)
    assert len(found["answers"]) == 24
    for ours, theirs in zip(found["answers"], wanted["answers"], strict=True):
        assert [logprob for logprob, _ in ours] == pytest.approx([logprob for logprob, _ in theirs], rel=1e-4)
        assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]


@pytest.mark.parametrize("backend", BACKENDS)
def test_lm_eval_perplexity(lm_eval, backend, tokenizer, engine):
    lengths = [len(tokenizer(chapter["text"])["input_ids"]) for chapter in chapters()]
    assert min(lengths) < engine.longest < max(lengths) / 2, "chapters of one window, and of several"
    wanted, found = lm_eval["hf"]["kjv_chapters"], lm_eval[backend]["kjv_chapters"]
    assert {"word_perplexity,none", "byte_perplexity,none", "bits_per_byte,none"} <= found["metrics"].keys()
    assert found["metrics"] == pytest.approx(wanted["metrics"], rel=1e-4)
    ours, theirs = ([logprob for [logprob] in each["answers"]] for each in (found, wanted))
    assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_lm_eval_generation(lm_eval, backend):
    wanted, found = lm_eval["hf"]["kjv_verses"], lm_eval[backend]["kjv_verses"]
    assert found == wanted and len(found["answers"]) == 24 and 0 < found["metrics"]["exact_match,none"] < 1
