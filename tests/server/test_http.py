"""What HTTP brings: keys, limits, numbers, and clients that go away."""

import http.client
import json
import socket
import time
from contextlib import closing
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

COMPLETION = "/v1/completions"


def asked(url, method, path, body=None, **headers):
    """Return the status, the headers and the JSON of a response."""
    data = body if isinstance(body, bytes | None) else json.dumps(body)
    with closing(http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)) as connection:
        connection.request(method, path, data, headers)
        response = connection.getresponse()
        text = response.read()
    return response.status, response.headers, json.loads(text) if text else None


def test_health(url):
    for path in ("/health", "/ready"):
        assert asked(url, "GET", path)[0] == 200


def test_errors_have_one_form(url):
    for method, path, body, status in (
        ("GET", "/nothing", None, 404),
        ("GET", COMPLETION, None, 405),
        ("POST", COMPLETION, b"{", 400),
        ("POST", COMPLETION, b"[]", 400),
        ("POST", COMPLETION, b'{"prompt": NaN}', 400),
        ("POST", COMPLETION, b"\xff", 400),
        ("POST", COMPLETION, b"[" * 100_000, 400),
        ("POST", COMPLETION, dict(model="other", prompt="a"), 404),
    ):
        found, _, told = asked(url, method, path, body)
        assert found == status and {"message", "type", "param", "code"} == told["error"].keys()


def test_a_key(started):
    url = started(keys=["first", "second"]).address()
    assert asked(url, "GET", "/health")[0] == 200
    for path in ("/v1/models", "/tokenizer_info", "/nothing"):
        for headers in ({}, dict(Authorization="Bearer wrong"), dict(Authorization="first")):
            status, _, told = asked(url, "GET", path, **headers)
            assert status == 401 and told["error"]["code"] == "invalid_api_key"
    for key in ("first", "second"):
        assert asked(url, "GET", "/v1/models", Authorization=f"Bearer {key}")[0] == 200


def test_a_body_that_is_too_large(started):
    url = started(most_body=1000).address()
    assert asked(url, "POST", COMPLETION, dict(prompt="a" * 1000))[0] == 413
    with closing(http.client.HTTPConnection(urlsplit(url).netloc)) as connection:
        connection.request("POST", COMPLETION, iter([b"a" * 600] * 2), encode_chunked=True)
        assert connection.getresponse().status == 413


def test_numbers_of_requests(url):
    assert asked(url, "GET", "/health", **{"X-Request-Id": "mine-1"})[1]["X-Request-Id"] == "mine-1"
    made = asked(url, "GET", "/nothing", **{"X-Request-Id": "not mine\t"})[1]["X-Request-Id"]
    assert len(made) == 32


def test_no_other_origin_unless_given(started, url):
    assert "Access-Control-Allow-Origin" not in asked(url, "GET", "/v1/models", Origin="http://page")[1]
    given = started(origins=["http://page"]).address()
    assert asked(given, "GET", "/v1/models", Origin="http://page")[1]["Access-Control-Allow-Origin"] == "http://page"
    assert "Access-Control-Allow-Origin" not in asked(given, "GET", "/v1/models", Origin="http://other")[1]


def test_tokens(url, tokenizer):
    ids = tokenizer("In the beginning")["input_ids"]
    _, _, told = asked(url, "POST", "/tokenize", dict(prompt="In the beginning"))
    assert told == dict(tokens=ids, count=len(ids), max_model_len=256)
    assert asked(url, "POST", "/detokenize", dict(tokens=ids))[2] == dict(prompt="In the beginning")
    chat = asked(url, "POST", "/tokenize", dict(messages=[dict(role="user", content="Moses")]))[2]
    assert tokenizer.decode(chat["tokens"]) == "Moses\nAnswer: "
    assert asked(url, "GET", "/tokenizer_info")[2]["eos_token"] == tokenizer.eos_token


def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it happens soon"
        time.sleep(0.01)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("after", ["waiting", "running"])
def test_who_goes_away_is_forgotten(url, engine, stream, after):
    body = dict(prompt="And", max_tokens=250, ignore_eos=True, stream=stream, n=16)  # rows are 4
    with closing(http.client.HTTPConnection(urlsplit(url).netloc)) as connection:
        connection.request("POST", COMPLETION, json.dumps(body))
        wait_for(lambda: len(engine.scheduler))
        if after == "running" and stream:
            connection.getresponse().read(10)
        connection.sock.shutdown(socket.SHUT_RDWR)
    wait_for(lambda: not len(engine.scheduler))
    assert engine.healthy(60)


def test_a_server_that_stops_takes_no_more(started):
    running = started()
    running.server.draining = True
    url = running.address()
    assert asked(url, "GET", "/health")[0] == 200 and asked(url, "GET", "/ready")[0] == 503
    status, headers, told = asked(url, "POST", COMPLETION, dict(prompt="a"))
    assert status == 503 and headers["Retry-After"] == "1" and "stopping" in told["error"]["message"]


def metrics_of(url):
    """Return what Prometheus reads: values by the name and the label that is not the model's."""
    with urlopen(f"{url}/metrics") as response:
        assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        text = response.read().decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert {sample.labels["model"] for sample in samples} == {"tiny-kjv"}
    others = ("reason", "status", "le")
    return {
        (
            sample.name.removeprefix("transformers_neuronx_"),
            next((sample.labels[each] for each in others if each in sample.labels), None),
        ): sample.value
        for sample in samples
    }


def test_metrics(url):
    before = metrics_of(url)
    body = dict(prompt=[*range(300, 390)], max_tokens=9, ignore_eos=True)
    for _ in range(2):
        assert asked(url, "POST", COMPLETION, body)[0] == 200
    assert asked(url, "POST", COMPLETION, dict(prompt="a", n=0))[0] == 400
    after = metrics_of(url)
    grown = {key: value - before.get(key, 0) for key, value in after.items()}
    assert grown["prompt_tokens_total", None] == 180 and grown["cached_prompt_tokens_total", None] >= 64
    assert grown["generated_tokens_total", None] == 18 and grown["finished_requests_total", "length"] == 2
    assert grown["http_responses_total", "200"] == 3 and grown["http_responses_total", "400"] == 1
    for name in ("time_to_first_token", "queue", "prefill", "decode", "request", "time_per_output_token"):
        assert grown[f"{name}_seconds_count", None] == 2, name
    assert grown["inter_token_seconds_count", None] == 16 and grown["step_seconds_count", None] >= 18
    assert grown["request_prompt_tokens_sum", None] == 180 and grown["request_generated_tokens_bucket", "16"] == 2
    assert (
        after["requests_running", None] == after["requests_waiting", None] == 0 == after["cache_positions_used", None]
    )
    assert after["rows", None] == 4 and after["cache_positions", None] > 0
