"""What HTTP brings: keys, limits, numbers, and clients that go away."""

import http.client
import json
import socket
import time
from contextlib import closing
from urllib.parse import urlsplit

import pytest

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
