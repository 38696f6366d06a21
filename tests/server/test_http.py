"""What HTTP brings: keys, limits, numbers, and clients that go away."""

import base64
import http.client
import json
import socket
import time
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

from transformers_neuronx import Engine, serving
from transformers_neuronx.server.answers import Choice
from transformers_neuronx.server.logs import JsonLines

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


def test_without_a_key_nothing_is_open_but_health(started):
    """All routes, and paths that look like files."""
    server = started(keys=["secret"])
    url = server.address()
    routes = [(method, route.path) for route in server.server.app.routes for method in route.methods]
    assert ("POST", "/v1/chat/completions") in routes and ("GET", "/") in routes and len(routes) > 15
    files = ("/../../../../etc/passwd", "/..%2f..%2f..%2fetc/passwd", "//etc/passwd", "/static/../../setup.py")
    for method, path in [*routes, *(("GET", path) for path in files), ("DELETE", "/v1/models"), ("PUT", "/")]:
        status, _, told = asked(url, method, path, b"" if method == "POST" else None)
        wanted = 200 if path in ("/health", "/ready") else 401
        assert (status, bool(told)) == (wanted, wanted == 401 and method != "HEAD"), (method, path)
    for path in files:
        assert asked(url, "GET", path, Authorization="Bearer secret")[0] == 404


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
    assert {sample.labels.get("model") for sample in samples} <= {"tiny-kjv", None}
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
    assert grown["inter_token_seconds_count", None] == 16 and grown["step_seconds_count", None] >= 2
    assert grown["request_prompt_tokens_sum", None] == 180 and grown["request_generated_tokens_bucket", "16"] == 2
    assert (
        after["requests_running", None] == after["requests_waiting", None] == 0 == after["cache_positions_used", None]
    )
    assert after["rows", None] == 4 and after["cache_positions", None] > 0


HOSTILE = {
    "top_k": (dict(prompt="a", top_k=2**40), 400),
    "a name of a token": (dict(prompt="a", logit_bias={"9" * 5000: 1}), 400),
    "a bias": (dict(prompt="a", logit_bias={"5": 1e308}), 400),
    "a stop token": (dict(prompt="a", min_tokens=2, stop_token_ids=[5000]), 400),
    "a tiny temperature": (dict(prompt="a", temperature=1e-300, max_tokens=2), 200),
    "a huge temperature": (dict(prompt="a", temperature=4e307, max_tokens=2), 200),
    "a huge penalty": (dict(prompt="a", repetition_penalty=4e307), 400),
    "a schema of itself": (dict(prompt="a", structured_outputs=dict(json={"$ref": "#"})), 400),
    "a grammar of itself": (dict(prompt="a", structured_outputs=dict(grammar="start: start")), 400),
    "a large expression": (dict(prompt="a", structured_outputs=dict(regex="(a{1000}){1000}")), 400),
    "no choice": (dict(prompt="a", structured_outputs=dict(choice=[])), 400),
    "any JSON": (dict(prompt="a", structured_outputs=dict(json={}), max_tokens=2), 200),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_no_one_sends(url, name):
    body, wanted = HOSTILE[name]
    status, _, told = asked(url, "POST", COMPLETION, body)
    assert status == wanted, told
    assert wanted == 200 or len(told["error"]["message"]) < 300


def nested(depth):
    value = "a"
    for _ in range(depth):
        value = [value]
    return value


def test_what_is_nested_too_deep(url):
    call = dict(function=dict(name="a", arguments="[" * 100_000))
    schema = dict(type="function", function=dict(name="a", parameters=dict(a=nested(900))))
    body = dict(messages=[dict(role="user", content="a")])
    for more in (
        dict(messages=[dict(role="assistant", tool_calls=[call])]),
        dict(messages=[dict(role="user", content="a", more=nested(900))]),
        dict(tools=[schema], tool_choice="required"),
        dict(chat_template_kwargs=dict(a=nested(300))),
    ):
        assert asked(url, "POST", "/v1/chat/completions", body | more)[0] == 400
    assert asked(url, "POST", "/v1/chat/completions", body | dict(max_tokens=1, more=nested(190)))[0] == 200


def test_ids_that_are_no_tokens(url):
    assert asked(url, "POST", "/detokenize", dict(tokens=[2**40]))[0] == 400


def test_a_mistake_of_ours_has_a_number_and_no_trace(started, monkeypatch, caplog):
    running = started()
    monkeypatch.setattr(running.server.served[0].prompts, "facts", lambda: 1 / 0)
    status, headers, told = asked(running.address(), "GET", "/tokenizer_info", **{"X-Request-Id": "mine"})
    assert (status, headers["X-Request-Id"]) == (500, "mine") and "ZeroDivision" not in str(told)
    assert metrics_of(running.address())["http_responses_total", "500"] == 1
    assert "request mine failed" in caplog.text and "ZeroDivisionError" in caplog.text


def test_who_goes_away_while_it_sends(started, caplog):
    running = started()
    host, port = urlsplit(running.address()).netloc.split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n{")
    for _ in range(100):
        if metrics_of(running.address()).get(("http_responses_total", "499")):
            break
        time.sleep(0.05)
    assert metrics_of(running.address())["http_responses_total", "499"] == 1 and "Traceback" not in caplog.text


def test_who_sends_for_too_long(started):
    host, port = urlsplit(started(most_seconds=0.1).address()).netloc.split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n{")
        response = http.client.HTTPResponse(connection)
        response.begin()
        told = response.read().decode()
    assert response.status == 408 and "the body took longer than 0.1 seconds" in told


def test_a_browser_asks_for_the_key(started):
    url = started(keys=["secret"]).address()
    status, headers, _ = asked(url, "GET", "/v1/models", Accept="text/html")
    assert status == 401 and headers["WWW-Authenticate"].startswith("Basic")
    assert asked(url, "GET", "/v1/models")[1]["WWW-Authenticate"] == "Bearer"
    for given, wanted in (("any:secret", 200), (":secret", 200), ("secret", 401), ("any:", 401)):
        basic = base64.b64encode(given.encode()).decode()
        assert asked(url, "GET", "/v1/models", Authorization=f"Basic {basic}")[0] == wanted
    assert asked(url, "GET", "/v1/models", Authorization="Basic é")[0] == 401
    assert asked(url, "GET", "/health/", Authorization="Bearer secret")[0] == 404


def test_requests_that_take_too_long(started, engine, monkeypatch):
    start, limits = engine._loop.start, engine.scheduler.limits
    monkeypatch.setattr(engine.scheduler, "limits", replace(limits, rounds=1))  # even if nobody reads it yet
    monkeypatch.setattr(engine._loop, "start", lambda: (time.sleep(0.02), start()))  # an answer takes four seconds
    url = started(most_seconds=0.5).address()
    body = dict(prompt="a", max_tokens=200, n=4, ignore_eos=True)
    status, _, told = asked(url, "POST", COMPLETION, body)
    assert (status, told["error"]["message"]) == (504, "the answer took longer than 0.5 seconds")
    with closing(http.client.HTTPConnection(urlsplit(url).netloc)) as connection:
        connection.request("POST", COMPLETION, json.dumps(body | dict(stream=True)))
        *_, last, end = connection.getresponse().read().decode().split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout" and end == ""
    assert not len(engine.scheduler)


def test_logs(started, caplog):
    url = started(logs_prompts=True).address()
    with caplog.at_level("INFO"):
        asked(url, "POST", COMPLETION, dict(prompt="In the", max_tokens=1), **{"X-Request-Id": "mine"})
        wait_for(lambda: f"POST {COMPLETION}" in caplog.text)  # the response is there before this line
    lines = [json.loads(JsonLines().format(record)) for record in caplog.records]
    [prompt] = [line for line in lines if line["message"].startswith("prompt: ")]
    [answered] = [line for line in lines if line.get("path") == COMPLETION]
    assert prompt["message"] == "prompt: In the" and prompt["level"] == "INFO"
    assert answered["status"] == 200 and answered["method"] == "POST" and answered["message"].endswith(" mine")


def test_no_text_of_prompts_unless_it_is_asked_for(url, caplog):
    with caplog.at_level("DEBUG"):
        asked(url, "POST", COMPLETION, dict(prompt="In the secret", max_tokens=1))
        asked(url, "POST", COMPLETION, dict(prompt="In the secret", max_tokens=0))
    assert caplog.records and "secret" not in caplog.text


def test_several_models(engine, model, tokenizer):
    with Engine(model, rows=1, step_tokens=16, tokenizer=tokenizer) as other:
        client = TestClient(serving.app(dict(kjv=engine, small=other, alias=engine)))
        about = client.get("/v1/models").json()["data"]
        assert [(each["id"], each["root"]) for each in about] == [("kjv", "kjv"), ("small", "small"), ("alias", "kjv")]

        def answered(name):
            before = other.metrics.records.ended.total()
            body = dict(model=name, prompt="In the beginning", max_tokens=4, temperature=0)
            answer = client.post(COMPLETION, json=body).json()
            return answer["model"], answer["choices"][0]["text"], other.metrics.records.ended.total() - before

        (_, text, _), by_other = answered("kjv"), answered("small")
        assert by_other == ("small", text, 1)
        assert answered("alias") == answered(None) == ("kjv", text, 0)
        assert client.get("/tokenizer_info?model=none").status_code == 404
        told = [*text_string_to_metric_families(client.get("/metrics").text)]
        steps = next(each for each in told if each.name.endswith("step_seconds"))
        assert {each.labels["model"] for each in steps.samples} == {"kjv", "small"}
        assert len({each.name for each in told}) == len(told), "each has its lines together"
    assert client.get("/health").status_code == 503, "one of its engines is closed"


def test_an_application_inside_of_another(engine):
    whole = Starlette(routes=[Mount("/llm", serving.app(dict(kjv=engine), keys=["secret"]))])
    client = TestClient(whole, headers=dict(Authorization="Bearer secret"))
    answer = client.post("/llm/v1/completions", json=dict(model="kjv", prompt="In the", max_tokens=2)).json()
    assert answer["usage"]["completion_tokens"] == 2
    assert TestClient(whole).get("/llm/v1/models").status_code == 401
    assert TestClient(whole).get("/llm/health").status_code == 200


def test_text_that_comes_after_its_token_is_told():
    """An engine's thread may be between the two when a stream looks."""
    handle = SimpleNamespace(tokens=[1], text="", finish_reason=None)
    choice = Choice(0, handle)
    assert choice.news(scores=False).text == ""
    handle.text, handle.finish_reason = "a", "length"
    assert choice.news(scores=False).text == "a"
    assert choice.news(scores=False) is None and choice.ended
