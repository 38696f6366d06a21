"""Requests drawn from the server's description, right ones and wrong ones. None of them may break the server.

python tests/server/fuzz.py --minutes 30

Schemathesis sends them. It imports this file for values that come further than any text does, and for what an answer
must be.
"""

import argparse
import atexit
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import schemathesis
from served import NAME, Served, checkpoint

from transformers_neuronx.server.openapi import description

FEW = 8  # tokens of an answer, and sequences: they take most of the time
LIMIT = 60  # seconds without an answer
WORKERS = 4
CHECKS = ("sound", "status_code_conformance", "content_type_conformance", "response_schema_conformance")
IDS = dict(type="array", items=dict(type="integer", minimum=0, maximum=1022), maxItems=300)
TEXT = dict(type="string", maxLength=300)
TEXTS = dict(anyOf=[TEXT, IDS, dict(type="array", items=TEXT, maxItems=4), dict(type="array", items=IDS, maxItems=4)])
CALL = dict(function=dict(name="look", arguments='{"place": "here"}'), type="function", id="a")
MESSAGE = dict(
    role=dict(enum=["user", "assistant", "system", "tool"]), content=TEXT, tool_calls=dict(enum=[[CALL], None])
)
OBJECT = dict(type="object", properties=dict(a=dict(type="string", maxLength=9)), required=["a"])
LIKELY = {
    "model": dict(enum=[NAME, None]),
    "prompt": TEXTS,
    "input": TEXTS,
    "tokens": IDS,
    "messages": dict(
        type="array",
        items=dict(type="object", required=["role", "content"], properties=MESSAGE),
    ),
    "chat_template_kwargs": dict(enum=[None, {}, dict(tokenize=True), dict(enable_thinking=False)]),
    "parameters": dict(enum=[OBJECT, dict(type="object"), None]),
    "tool_choice": dict(enum=["none", "auto", "required", None, dict(type="function", function=dict(name="look"))]),
    "schema": dict(enum=[OBJECT, dict(type="boolean"), dict(enum=[1, "é"]), dict(anyOf=[OBJECT, dict(type="null")])]),
    "json": dict(enum=[OBJECT, "{}", json.dumps(OBJECT), dict(type="array", items=OBJECT)]),
    "regex": dict(enum=["a+", "[0-9]{3}", "(yes|no)", r"\w+ \d", "é*"]),
    "grammar": dict(enum=['start: "a" | "b"', 'start: "(" start ")" | "x"', "start: A+\nA: /[a-c]/"]),
}
statuses = Counter()


@schemathesis.hook
def before_load_schema(context, raw_schema):
    """Let fields have values that are likely to be right, besides all others."""
    for schema in raw_schema["components"]["schemas"].values():
        fields = schema["properties"]
        for name in fields.keys() & LIKELY.keys():
            fields[name] = dict(anyOf=[LIKELY[name], LIKELY[name], LIKELY[name], fields[name]])


@schemathesis.hook
def before_call(context, case, kwargs):
    """Let answers be short."""
    if isinstance(case.body, dict) and "completions" in case.path:
        for name, default in dict(max_tokens=FEW, max_completion_tokens=None, n=None).items():
            value = case.body.get(name, default)
            if value is None and default is not None:
                case.body[name] = default
            elif type(value) is int and FEW < value <= 256:
                case.body[name] = FEW


@schemathesis.hook
def after_call(context, case, response):
    statuses[response.status_code] += 1


@atexit.register
def report():
    if statuses:
        print("responses:", ", ".join(f"{count} with {status}" for status, count in sorted(statuses.items())))


@schemathesis.check
def sound(context, response, case):
    """An answer says what is wrong, in one form, and nothing of what is inside of the server."""
    status, body = response.status_code, response.content
    assert status < 500 or status == 503, "the request is wrong, or the server is"
    assert b"Traceback" not in body, "nobody needs to see the code"
    assert response.headers.get("x-request-id"), "all requests have numbers"
    if status >= 400 and case.method != "HEAD":
        error = json.loads(body)["error"]
        assert error.keys() == {"message", "type", "param", "code"}, "errors have one form"
    if "event-stream" in response.headers.get("content-type", [""])[0]:
        assert body.endswith(b"data: [DONE]\n\n") or b'data: {"error"' in body, "a stream has an end"


def fuzz(url, seconds, directory):
    """Send requests to a server for so many seconds. Return the status of schemathesis, 0 if all is well."""
    (told := Path(directory) / "openapi.json").write_bytes(description(NAME))
    # Otherwise only the first 20 events of a stream are read.
    (Path(directory) / "schemathesis.toml").write_text("max-stream-events = 100000\n")
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    how = dict(SCHEMATHESIS_HOOKS=Path(__file__).stem, PYTHONPATH=paths)
    command = [sys.executable, "-m", "schemathesis.cli", "run", str(told), "--url", url, "--max-time", str(seconds)]
    command += ["--checks", ",".join(CHECKS), "--continue-on-failure", "--phases", "examples,coverage,fuzzing"]
    command += ["--request-timeout", str(LIMIT), "--generation-database", "none", "--suppress-health-check", "all"]
    command += ["--workers", str(WORKERS), "--warnings", "off", "--output-sanitize", "false"]
    return subprocess.run(command, env=os.environ | how, cwd=directory).returncode


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30, help="how long (default: %(default)s)")
    seconds = round(parser.parse_args().minutes * 60)
    with tempfile.TemporaryDirectory(prefix="fuzz_") as directory:
        checkpoint(Path(directory) / "model")
        served = Served(Path(directory) / "model", Path(directory) / "server.log")
        try:
            status = fuzz(served.url, seconds, directory)
        finally:
            served.kill()
        found = served.tracebacks()
    for line, count in found.items():
        print(f"{count} times in the log: {line}")
    sys.exit(bool(status or found))


if __name__ == "__main__":
    main()
