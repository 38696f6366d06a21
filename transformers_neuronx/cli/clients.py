"""Clients of a server with OpenAI's interface: they send requests, and take the times of answers."""

from __future__ import annotations

import asyncio
from itertools import product
from time import perf_counter
from typing import Any

import httpx2
import msgspec
import numpy as np
import typer

from transformers_neuronx import env
from transformers_neuronx.cli import options as o
from transformers_neuronx.cli.load import Call, answered, figures
from transformers_neuronx.cli.prompts import printable
from transformers_neuronx.cli.traffic import VARIED, WORDS, Ask, Pool, Traffic
from transformers_neuronx.errors import ConfigError, TransformersNeuronxError
from transformers_neuronx.support.progress import bar

CONNECTING, QUIET = 30, 3600  # seconds to connect, and without a byte, after which a request has failed
IDLE = 2  # seconds after which a connection is not used again: servers close theirs after 5


class Choice(msgspec.Struct):
    text: str | None = None
    token_ids: list[int] | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class Chunk(msgspec.Struct):
    """An event of a stream."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: Any = None


class Model(msgspec.Struct):
    id: str


class Models(msgspec.Struct):
    data: list[Model]


class Tokens(msgspec.Struct):
    tokens: list[int]


def measured_server(
    url: str, model: str | None, key: str | None, vocabulary: int | None, traffic: Traffic
) -> list[dict[str, Any]]:
    """Return a result for each measurement of a server at `url`, which usually ends in /v1.

    Requests name the `model`, by default the server's first one, and have a `key`, by default that of the environment.
    Prompts are ids below `vocabulary`, by default ids that the server's tokenizer gives, or words if it gives none.
    Results say how many requests failed, and why the first one did. Raises ConfigError for an address or a key that
    cannot be one, and TransformersNeuronxError if the server does not say which models it has.
    """
    key = (env.CLIENT_KEY.get() if key is None else key).strip()
    if not (key.isascii() and key.isprintable()):
        raise ConfigError("the API key must be printable ASCII, since a header has it")
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    return asyncio.run(_measured(_address(url), model, headers, vocabulary, traffic))


def _address(url: str) -> str:
    try:
        found = httpx2.URL(url)
        usable = found.scheme in ("http", "https") and found.host and (found.port or 80) < 2**16
    except httpx2.InvalidURL:
        usable = False
    if not usable:
        raise ConfigError(f"--url must be like http://127.0.0.1:8000/v1, got {url!r}")
    return url.rstrip("/")


async def _measured(
    url: str, model: str | None, headers: dict[str, str], vocabulary: int | None, traffic: Traffic
) -> list[dict[str, Any]]:
    timeout = httpx2.Timeout(QUIET, connect=CONNECTING, pool=None)
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=IDLE)
    async with httpx2.AsyncClient(headers=headers, timeout=timeout, limits=limits) as http:
        client = Client(http, url, model or await _first_model(http, url))
        pool = await client.pool() if vocabulary is None else np.arange(vocabulary)
        random, results = np.random.default_rng(traffic.seed), []
        for rate, most, prompt, new in product(traffic.rates, traffic.most, traffic.prompts, traffic.news):
            asked, times = [*traffic.asks(pool, prompt, new, random)], traffic.times(rate, random)
            await client.answer(asked.pop())  # not counted: a server's first request may take longer
            sent = f"{most} at once" if rate is None else f"{rate:g} a second"
            with bar(sent if prompt is None else f"{sent}: {prompt} + {new}", len(asked)) as shown:
                calls = await answered(client.answer, asked, times, most, shown)
            errors = [call.error for call in calls if call.error is not None]
            given = dict(load=traffic.kind, requests=len(asked), rate=rate, concurrency=most, prompt=prompt, new=new)
            failed = dict(failed=len(errors), error=errors[0] if errors else None)
            results.append(o.said(**given) | failed | figures(calls, traffic.limits))
    return results


async def _first_model(http: httpx2.AsyncClient, url: str) -> str:
    try:
        response = await http.get(f"{url}/models")
        _check_status(response)
        names = [model.id for model in msgspec.json.decode(response.content, type=Models).data]
    except (httpx2.HTTPError, msgspec.MsgspecError, TransformersNeuronxError) as error:
        raise TransformersNeuronxError(f"{url}/models: {_reason(error)}") from error
    if not names:
        raise TransformersNeuronxError(f"{url}/models names no model: give one with --model-name")
    return names[0]


class Client:
    """What sends requests that name a `model` to a server."""

    def __init__(self, http: httpx2.AsyncClient, url: str, model: str) -> None:
        self.http, self.url, self.model = http, url, model

    async def pool(self) -> Pool:
        """Return ids of the server's tokenizer, or words if it does not tell any."""
        place = f"{self.url.removesuffix('/v1')}/tokenize"
        # As vLLM and this package's server take it, and as llama.cpp's does.
        for body in (dict(model=self.model, prompt=VARIED, add_special_tokens=False), dict(content=VARIED)):
            try:
                response = await self.http.post(place, content=msgspec.json.encode(body))
                _check_status(response)
                if ids := msgspec.json.decode(response.content, type=Tokens).tokens:
                    return np.unique(ids)
            except (httpx2.HTTPError, msgspec.MsgspecError, TransformersNeuronxError):
                continue
        typer.echo(
            f"{place} gives no token ids: prompts are words, of about a token each, unless --vocab is given", err=True
        )
        return np.array(WORDS)

    async def answer(self, ask: Ask) -> Call:
        """Send a request, and read its answer. Whatever goes wrong is the call's error."""
        body = dict(
            model=self.model, prompt=ask.prompt, max_tokens=ask.new, temperature=0, ignore_eos=True, stream=True,
            stream_options=dict(include_usage=True), return_token_ids=True,
        )  # fmt: skip
        content = msgspec.json.encode(body)
        call = Call(perf_counter(), [], 0.0, ask.length, 0)
        try:
            async with self.http.sse(f"{self.url}/completions", method="POST", content=content) as events:
                if events.response.status_code != 200:
                    await events.response.aread()
                _check_status(events.response)
                await _read(events, call)
        except (httpx2.HTTPError, msgspec.MsgspecError, TransformersNeuronxError) as error:
            call.error, call.ended = _reason(error), perf_counter()
        return call


async def _read(events: httpx2.EventSource, call: Call) -> None:
    """Complete a call from the events of its stream. Raises an error if they are not those of an answer."""
    usage, complete = Usage(), False
    async for event in events:
        now = perf_counter()
        if event.data == "[DONE]":
            complete = True  # and on to the end of the response, after which its connection can be used again
            continue
        if not event.data:
            continue
        chunk = msgspec.json.decode(event.data, type=Chunk)
        if chunk.error:
            raise TransformersNeuronxError(_message(chunk.error))
        if chunk.choices:
            call.ended = now
            if chunk.choices[0].text or chunk.choices[0].token_ids:
                call.came.append(now)
        usage = chunk.usage or usage
    if not complete:
        raise TransformersNeuronxError("the stream ended before [DONE]")
    if not call.came:
        raise TransformersNeuronxError("the answer has no tokens")
    call.prompt_tokens = usage.prompt_tokens or call.prompt_tokens
    call.output_tokens = usage.completion_tokens or len(call.came)


def _check_status(response: httpx2.Response) -> None:
    """Raise an error for any status but 200. The body has been read if there is one."""
    if response.status_code == 200:
        return
    try:
        message = _message(msgspec.json.decode(response.content))
    except msgspec.MsgspecError:
        message = response.text
    raise TransformersNeuronxError(f"HTTP {response.status_code}: {message}")


def _message(error: Any) -> str:
    """Return the message of an error, in any of the forms that servers have for it."""
    for name in ("error", "message", "detail"):
        if isinstance(error, dict) and error.get(name):
            error = error[name]
    return str(error)


def _reason(error: Exception) -> str:
    return printable(str(error) or type(error).__name__)[:300]
