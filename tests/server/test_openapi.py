"""The description of the server says what the server does."""

import json
from unittest.mock import Mock

import httpx2
import jsonschema
import pytest

from transformers_neuronx.server.app import Server
from transformers_neuronx.server.errors import Body
from transformers_neuronx.server.fields import fields_of
from transformers_neuronx.server.openapi import OPERATIONS, description
from transformers_neuronx.server.settings import Settings

MOST = 300  # bytes of a body


@pytest.fixture(scope="module")
def told():
    return json.loads(description("tiny-kjv"))


@pytest.fixture(scope="module")
def server(started):
    """A client of a server that needs a key, and has it."""
    url = started(keys=["secret"], most_body=MOST).address()
    with httpx2.Client(base_url=url, headers=dict(Authorization="Bearer secret"), timeout=60) as client:
        yield client


def operations(told):
    return [(path, method, what) for path, methods in told["paths"].items() for method, what in methods.items()]


@pytest.mark.parametrize("updates", [False, True])
def test_it_has_the_routes_of_the_server_and_no_others(updates):
    told, server = json.loads(description("m", updates)), Server(dict(m=Mock()), Settings(updates_adapters=updates))
    routes = [route for route in server.app.routes if route.include_in_schema]
    wanted = {(route.path_format, method.lower()) for route in routes for method in route.methods - {"HEAD"}}
    assert {(path, method) for path, method, _ in operations(told)} == wanted
    assert len({what["operationId"] for *_, what in operations(told)}) == len(wanted)


def references(value):
    if isinstance(value, dict):
        yield from [value["$ref"]] if "$ref" in value else []
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from references(each)


def test_its_schemas_are_right_and_all_are_used(told):
    schemas = told["components"]["schemas"]
    assert set(references(told)) == {f"#/components/schemas/{name}" for name in schemas}
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)


def validated(value, schema, told):
    jsonschema.validate(value, schema | dict(components=told["components"]))


def example(operation):
    """Return the example of a body, with its schema, or two times None."""
    [content] = operation.get("requestBody", dict(content=dict(none={})))["content"].values()
    return content.get("example"), content.get("schema")


@pytest.mark.parametrize("operation", [each for each in OPERATIONS if each.body], ids=lambda each: each.path)
def test_examples_are_right(told, operation):
    body, schema = example(told["paths"][operation.path]["post"])
    validated(body, schema, told)
    fields_of(operation.body, json.dumps(body).encode())


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda each: each.path)
def test_answers_are_as_it_says(told, server, operation):
    [(method, what)] = told["paths"][operation.path].items()
    body, _ = example(what)

    def answer(name="tiny-kjv", **changed):
        how = dict(content=json.dumps(body | dict(model=name))) if body else {}
        return server.request(method, operation.path.replace("{name}", name), **how | changed)

    answers = [answer(), answer("another"), answer(headers=dict(Authorization=""))]
    if body:
        answers += [answer(content=b"{"), answer(content=b" " * (MOST + 1))]
    never = {408, 429, 503, 504}  # as this server is set; other tests of this folder have them
    never |= {200} if operation.path == "/classify" else set()  # the bundled model has no score head
    assert {each.status_code for each in answers} == {int(status) for status in what["responses"]} - never
    for each in answers:
        contents = what["responses"][str(each.status_code)].get("content", {})
        kind = each.headers.get("Content-Type", "").partition(";")[0]
        assert kind in contents or not (kind or contents)
        if kind == "application/json":
            validated(each.json(), contents[kind]["schema"], told)


def test_a_stream_is_of_the_kind_that_it_says(told, server):
    for path in ("/v1/completions", "/v1/chat/completions"):
        what = told["paths"][path]["post"]
        answer = server.post(path, json=example(what)[0] | dict(stream=True))
        assert answer.headers["Content-Type"].partition(";")[0] in what["responses"]["200"]["content"]
        assert answer.text.endswith("data: [DONE]\n\n")


def test_errors_have_all_fields_that_it_says(told, server):
    assert server.get("/nothing").json()["error"].keys() == told["components"]["schemas"]["Detail"]["properties"].keys()
    assert told["components"]["schemas"][Body.__name__]["required"] == ["error"]
