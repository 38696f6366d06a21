"""`bench --url`: figures of a server's answers, and what goes wrong with servers."""

import asyncio
import json
import socket
import sys
import threading
from contextlib import closing
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from transformers_neuronx.cli.load import Call, answered, figures
from transformers_neuronx.cli.traffic import WORDS, Traffic
from transformers_neuronx.support.progress import bar

DONE = b"data: [DONE]\n\n"
STREAM = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Type: text/event-stream\r\n"
SHORT = ("-p", 4, "-n", 2, "--requests", 4, "--concurrency", 2)


@pytest.fixture
def bench(command, monkeypatch):
    """`bench(…, status=0)`: what the command prints and what it says."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    return partial(command, "bench")


def event(*texts, **others):
    """An event of a stream with a choice for each text."""
    return b"data: " + json.dumps(dict(choices=[dict(text=text) for text in texts]) | others).encode() + b"\n\n"


def stream(*events):
    """A response that ends with its connection."""
    return STREAM + b"\r\n" + b"".join(events)


def plain(status, body):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return b"HTTP/1.1 %d .\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % (status, len(data)) + data


GOOD = stream(event("a"), event("b"), event(""), event(usage=dict(prompt_tokens=9, completion_tokens=5)), DONE)


@pytest.fixture
def fake():
    """`fake(*answers, ids=None)`: the address of a server, and the requests that it gets.

    It answers requests for completions in turn, and for token ids with `ids`, or not at all.
    """
    running = []

    def start(*answers, ids=None, models=("first", "second")):
        got, turn = [], iter(range(10**6))

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.wfile.write(plain(200, dict(data=[dict(id=name) for name in models])))

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                got.append((self.path, body, self.headers.get("Authorization")))
                if self.path == "/v1/completions":
                    self.wfile.write(answers[next(turn) % len(answers)])
                else:
                    self.wfile.write(plain(404, b"<html>") if ids is None else plain(200, dict(tokens=ids)))

            def log_message(self, *_):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        running.append((server, thread))
        return f"http://127.0.0.1:{server.server_port}/v1", got

    yield start
    for server, thread in running:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_server_with_so_many_at_once(bench, url):
    options = "-p", 8, "-p", 20, "-n", 6, "--requests", 6, "--concurrency", 1, "--concurrency", 3
    printed, said = bench("--url", f"{url}/v1", *options, "--json")
    results = json.loads(printed)
    assert said == ""
    assert [(result["concurrency"], result["prompt"]) for result in results] == [(1, 8), (1, 20), (3, 8), (3, 20)]
    for result in results:
        assert (result["load"], result["requests"], result["failed"], result["new"]) == ("random", 6, 0, 6)
        assert (result["prompt_tokens"], result["output_tokens"]) == (6 * result["prompt"], 36)
        assert result["tokens_per_second"] * result["seconds"] == pytest.approx(36)
        for name in ("ttft", "tpot", "itl", "e2el"):
            assert 0 < result[f"{name}_p50_ms"] <= result[f"{name}_p90_ms"] <= result[f"{name}_p99_ms"]
        assert result["ttft_p50_ms"] < result["e2el_p50_ms"] <= result["e2el_p99_ms"] <= result["seconds"] * 1e3


def test_a_server_with_requests_at_random_times(bench, url, tmp_path):
    options = "-p", 8, "-n", 4, "--requests", 6, "--rate", 100, "--rate", 200, "--goodput", "ttft:1e9"
    printed, _ = bench("--url", f"{url}/v1/", *options, "--plot", "rates.svg")
    heading, *lines = printed.splitlines()
    assert " ".join(heading.split()) == "rate prompt new TTFT p50 ms p99 ms ITL p50 ms p99 ms tokens/s good"
    assert [line.split()[:3] + line.split()[-1:] for line in lines] == [
        ["100", "8", "4", "100%"],
        ["200", "8", "4", "100%"],
    ]
    assert max(map(len, printed.splitlines())) <= 80
    assert (tmp_path / "rates.svg").read_text().count('id="axes_') == 2


def test_prompts_that_begin_alike(bench, url):
    shared = "--load", "shared", "--prefixes", 2, "--prefix", 64, "-p", 8, "-n", 2
    printed, _ = bench("--url", f"{url}/v1", *shared, "--requests", 5, "--concurrency", 1, "--json")
    [result] = json.loads(printed)
    assert result["prompt_tokens"] == 5 * 72 and result["load"] == "shared" and result["failed"] == 0


def test_prompts_without_lengths_that_fit(bench, url):
    printed, said = bench("--url", f"{url}/v1", "--load", "sharegpt", "--requests", 12, "--json")
    [result] = json.loads(printed)
    assert 0 < result["failed"] < 12 and "prompt" not in result
    assert said == f"{result['failed']} of 12 requests failed, the first one: {result['error']}\n"
    assert result["error"].startswith("HTTP 400: ")


def test_a_server_with_a_key(bench, started):
    address = f"{started(keys=['secret']).address()}/v1"
    assert "/models: HTTP 401: this server needs an API key" in bench("--url", address, *SHORT, status=1)[1]
    assert json.loads(bench("--url", address, *SHORT, "--api-key", "secret", "--json")[0])[0]["failed"] == 0


def test_what_a_request_says(bench, fake, monkeypatch):
    address, got = fake(GOOD, ids=[5, 3, 5, 900])
    bench("--url", address, *SHORT)
    path, asked, key = got[0]
    assert path == "/tokenize" and asked["model"] == "first" and len(asked["prompt"]) > 1000 and key is None
    assert len(got) == 6, "the first one is not counted"
    for path, asked, _ in got[1:]:
        prompt = asked.pop("prompt")
        assert path == "/v1/completions" and len(prompt) == 4 and set(prompt) <= {3, 5, 900}
        assert asked == dict(
            model="first", max_tokens=2, temperature=0, ignore_eos=True, stream=True, return_token_ids=True,
            stream_options=dict(include_usage=True),
        )  # fmt: skip
    monkeypatch.setenv("OPENAI_API_KEY", "from-outside\n")
    for options, wanted in (((), "Bearer from-outside"), (("--api-key", "given"), "Bearer given")):
        got.clear()
        bench("--url", address, "--model-name", "mine", "--vocab", 7, *SHORT, *options)
        assert {(path, asked["model"], key) for path, asked, key in got} == {("/v1/completions", "mine", wanted)}
        assert {token for _, asked, _ in got for token in asked["prompt"]} <= set(range(7))


def test_words_where_no_ids_are_known(bench, fake):
    address, got = fake(GOOD)
    _, said = bench("--url", address, *SHORT, "-p", 6)
    assert said.count("gives no token ids: prompts are words") == 1 == len(said.splitlines())
    assert [path for path, _, _ in got[:3]] == ["/tokenize", "/tokenize", "/v1/completions"]
    prompts = [asked["prompt"].split(" ") for _, asked, _ in got[2:]]
    assert {len(prompt) for prompt in prompts} == {4, 6} and {word for prompt in prompts for word in prompt} <= set(
        WORDS
    )


BREAKS = STREAM + b"Transfer-Encoding: chunked\r\n\r\n" + b"%x\r\n%s\r\n" % (len(event("a")), event("a"))
FAILURES = [
    (plain(429, dict(error=dict(message="slow\x1b down"))), "HTTP 429: slow\\x1b down"),
    (plain(404, dict(object="error", message="no model")), "HTTP 404: no model"),
    (plain(422, dict(detail="no prompt")), "HTTP 422: no prompt"),
    (plain(500, b"<html>oh"), "HTTP 500: <html>oh"),
    (stream(event("a"), b'data: {"error": {"message": "no memory"}}\n\n', DONE), "no memory"),
    (stream(event("a"), b'data: {"error": "no pages"}\n\n', DONE), "no pages"),
    (stream(event("a")), "the stream ended before [DONE]"),
    (stream(event(""), DONE), "the answer has no tokens"),
    (stream(event("a"), b"data: {\n\n", DONE), "Input data was truncated"),
    (stream(event("a"), b"data: []\n\n", DONE), "Expected `object`, got `array`"),
    (plain(200, {}), "Expected response with content type 'text/event-stream', got ''."),
    (BREAKS, "peer closed connection"),
    (b"", "Server disconnected without sending a response."),
]


@pytest.mark.parametrize(("answer", "why"), FAILURES, ids=[why for _, why in FAILURES])
def test_requests_that_fail(bench, fake, answer, why):
    address, _ = fake(answer, GOOD, ids=[1])
    printed, said = bench("--url", address, *SHORT, "--json", "--goodput", "e2el:1e9")
    [result] = json.loads(printed)
    assert (result["requests"], result["failed"], result["output_tokens"], result["goodput_share"]) == (4, 2, 10, 0.5)
    assert result["error"].startswith(why) and f"2 of 4 requests failed, the first one: {why}" in said
    address, _ = fake(answer, ids=[1])
    printed, said = bench("--url", address, *SHORT, "--plot", "all.svg", status=1)
    assert printed.split()[-8:] == ["2", "4", "2", "-", "-", "-", "-", "0.0"]
    assert f"4 of 4 requests failed, the first one: {why}" in said and "error: no request was answered" in said


def test_streams_that_are_unusual(bench, fake):
    alive = b": nothing new\r\n\r\n", b"event: ping\n\n", b'data: {"choices": null, "usage": null}\n\n'
    ids = b'data: {"choices": [{"text": "", "token_ids": [7, 8]}]}\n\n'
    letters = event("é☃🎉").replace(b"\n", b"\r\n")
    for answer, tokens in (
        (stream(*alive, event("a"), *alive, letters, event(""), DONE), 2),
        (stream(event(), ids, event("a"), event("b", usage=dict(completion_tokens=4)), event(), DONE), 4),
        (stream(json.dumps(dict(choices=[])).join(["data: ", "\n\n"]).encode(), event("\u2028"), DONE, *alive), 1),
    ):
        address, _ = fake(answer, ids=[1])
        [result] = json.loads(bench("--url", address, *SHORT, "--json")[0])
        assert (result["failed"], result["output_tokens"], result["prompt_tokens"]) == (0, 4 * tokens, 16)


def test_servers_that_are_none(bench, fake):
    address, _ = fake(GOOD, models=())
    assert "/models names no model: give one with --model-name" in bench("--url", address, *SHORT, status=1)[1]
    with closing(socket.create_server(("127.0.0.1", 0))) as nobody:
        address = f"http://127.0.0.1:{nobody.getsockname()[1]}/v1"
    assert f"error: {address}/models: All connection attempts failed" in bench("--url", address, status=1)[1]
    for url in ("127.0.0.1:8000", "ftp://there/v1", "http://", "http://[::1", "http://there:99999/v1", ""):
        assert f"--url must be like http://127.0.0.1:8000/v1, got {url!r}" in bench("--url", url, status=2)[1]
    assert "the API key must be printable ASCII" in bench("--url", address, "--api-key", "é", status=2)[1]


URL = ("--url", "http://nowhere.invalid/v1")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "bench needs a MODEL, or --url with the address of a server"),
        ((*URL, "gpt2"), "MODEL gpt2 does not go with --url: leave it out"),
        ((*URL, "--amp", "bf16"), "--amp does not go with --url: leave it out"),
        ((*URL, "-b", 2), "--batch-size does not go with --url: leave it out"),
        ((*URL, "--round-activations"), "--round-activations does not go with --url: leave it out"),
        (("gpt2", "--rate", 2), "--rate needs --url, the address of the server to measure"),
        (("gpt2", "--seed", 0), "--seed needs --url"),
        (("gpt2", "--goodput", "ttft:1"), "--goodput needs --url"),
        ((*URL, "--load", "own"), "--load must be one of random, shared, sharegpt, got 'own'"),
        ((*URL, "--prefix", 8), "--prefix needs --load shared"),
        ((*URL, "--load", "sharegpt", "-n", 8), "--load sharegpt draws all lengths: leave out --prompt and --new"),
        ((*URL, "--burstiness", 0.5), "--burstiness needs --rate"),
        ((*URL, "--rate", 2, "--concurrency", 1, "--concurrency", 2), "--rate takes one --concurrency"),
        ((*URL, "--requests", 4, "--concurrency", 5), "--concurrency must be at most --requests 4, got 5"),
        ((*URL, "--rate", 0), "must be 0.001 or more; got 0"),
        ((*URL, "--goodput", "itl:5"), "--goodput must be ttft:MS, tpot:MS or e2el:MS, once each, got 'itl:5'"),
        ((*URL, "--goodput", "ttft:5", "--goodput", "ttft:6"), "once each, got 'ttft:6'"),
        ((*URL, "--goodput", "ttft:nan"), "once each, got 'ttft:nan'"),
        ((*URL, "--goodput", "ttft"), "once each, got 'ttft'"),
    ],
)
def test_options_that_do_not_go_together(bench, options, message):
    printed, said = bench(*options, status=2)
    assert printed == "" and message in " ".join(said.replace("│", " ").split())


def test_without_its_packages_it_says_what_to_install(bench, monkeypatch):
    monkeypatch.delitem(sys.modules, "transformers_neuronx.cli.clients", raising=False)
    monkeypatch.setitem(sys.modules, "httpx2", None)
    assert 'bench --url needs httpx2: pip install "transformers-neuronx[serve]"' in bench(*URL, status=2)[1]


# Three requests: one token after each of 3 waits, pieces of several tokens, and only one token. One has failed.
CALLS = [
    Call(10.0, [10.5, 10.75, 11.0], 11.25, prompt_tokens=7, output_tokens=4),
    Call(10.5, [11.5, 12.5], 12.5, prompt_tokens=7, output_tokens=5),
    Call(11.0, [13.0], 13.0, prompt_tokens=6, output_tokens=1),
    Call(11.0, [11.5], 14.0, prompt_tokens=6, output_tokens=0, error="gone"),
]


def test_figures_by_hand():
    found = figures(CALLS)
    waits = dict(ttft=[500, 1000, 2000], tpot=[250, 250], itl=[250, 250, 1000], e2el=[1250, 2000, 2000])
    for name, ms in waits.items():
        assert found[f"{name}_mean_ms"] == pytest.approx(np.mean(ms))
        for percent in (50, 90, 99):
            assert found[f"{name}_p{percent}_ms"] == pytest.approx(np.percentile(ms, percent))
    rates = dict(requests=3 / 4, tokens=10 / 4, total_tokens=30 / 4)
    assert {name: found[f"{name}_per_second"] for name in rates} == pytest.approx(rates)
    assert (found["prompt_tokens"], found["output_tokens"], found["seconds"]) == (20, 10, 4.0)
    assert not any("goodput" in name for name in found)
    failed = figures(CALLS[3:])
    assert failed["ttft_p50_ms"] is failed["tpot_mean_ms"] is None and failed["tokens_per_second"] == 0


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        (dict(ttft=1000), 2),
        (dict(ttft=999), 1),
        (dict(tpot=250), 3),  # one token needs no time after the first
        (dict(tpot=249), 1),
        (dict(e2el=2000), 3),
        (dict(ttft=1000, e2el=1999), 1),
        (dict(ttft=1, tpot=1, e2el=1), 0),
    ],
)
def test_goodput_by_hand(limits, kept):
    found = figures(CALLS, limits)
    assert (found["goodput_per_second"], found["goodput_share"]) == (kept / 4, kept / 4)


def test_times_of_requests():
    assert Traffic(3).times(None, np.random.default_rng(0)) == [0.0] * 3
    for burstiness in (0.25, 1.0, 4.0):
        times = Traffic(40_000, burstiness=burstiness).times(5.0, np.random.default_rng(0))
        gaps = np.diff(times)
        assert gaps.min() >= 0 and gaps.mean() == pytest.approx(1 / 5, rel=0.05)
        assert (gaps.std() / gaps.mean()) ** 2 == pytest.approx(1 / burstiness, rel=0.1)


def test_no_more_at_once_than_are_asked_for():
    for most, wanted in ((3, 3), (None, 8)):
        running, seen = set(), []

        async def answer(each, running=running, seen=seen):
            running.add(each)
            seen.append(len(running))
            await asyncio.sleep(0)
            running.remove(each)
            return each

        with bar("requests", 8) as shown:
            assert asyncio.run(answered(answer, range(8), [0.0] * 8, most, shown)) == [*range(8)]
        assert max(seen) == wanted


def test_prompts_that_are_drawn():
    pool = np.arange(100, 50_000)

    def drawn(seed, **options):
        return [*Traffic(20, **options).asks(pool, 16, 8, np.random.default_rng(seed))]

    asks = drawn(0)
    assert asks == drawn(0) and asks != drawn(1)
    assert len({tuple(ask.prompt) for ask in asks}) == 21 and {(len(ask.prompt), ask.new) for ask in asks} == {(16, 8)}
    asks = drawn(0, kind="shared", prefixes=3, prefix=40)
    begins = [tuple(ask.prompt[:40]) for ask in asks]
    assert sorted(map(begins.count, set(begins))) == [7, 7, 7] and len({tuple(ask.prompt[40:]) for ask in asks}) == 21
    assert {ask.length for ask in asks} == {len(ask.prompt) for ask in asks} == {56}


def test_lengths_of_conversations():
    asks = [*Traffic(4000, "sharegpt").asks(np.arange(9), None, None, np.random.default_rng(0))]
    for lengths, mean in (([ask.length for ask in asks], 208), ([ask.new for ask in asks], 187)):
        assert min(lengths) >= 4 and max(lengths) == 1024 and np.mean(lengths) == pytest.approx(mean, rel=0.05)
        assert np.median(lengths) < np.mean(lengths)
