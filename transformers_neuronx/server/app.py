"""The application: routes, and what each of them does with the engine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from transformers_neuronx.errors import EngineError, GrammarError, InputError
from transformers_neuronx.server.answers import Answer, ChatAnswer, CompletionAnswer, event
from transformers_neuronx.server.embeddings import EmbeddingsAnswer
from transformers_neuronx.server.errors import ApiError, api_error, told
from transformers_neuronx.server.fields import Chat, Completion, Detokenize, Embeddings, Tokenize, fields_of
from transformers_neuronx.server.gate import Gate
from transformers_neuronx.server.metrics import ServerMetrics
from transformers_neuronx.server.openapi import description
from transformers_neuronx.server.page import headers, page
from transformers_neuronx.server.parameters import no_grammar, params_of
from transformers_neuronx.server.prompts import Prompts
from transformers_neuronx.server.settings import Settings
from transformers_neuronx.server.tools import Tools, tools_of
from transformers_neuronx.serving.engine import Engine
from transformers_neuronx.serving.handles import Handle

_LOG = logging.getLogger(__name__)


def app(engine: Engine, **settings: Any) -> ASGIApp:
    """Return an ASGI application that answers with an engine, which must have a tokenizer, and stays open.

    `settings` are those of `Settings`; `names` is by default the class of the model. Raises InputError for an engine
    without a tokenizer.
    """
    return Server(engine, Settings(**dict(names=[engine.metrics.model]) | settings)).app


class Server:
    """The routes of a server. With `draining`, it takes no more requests, and says that it is not ready."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        if engine.tokenizer is None:
            raise InputError("a server needs an engine with a tokenizer: Engine(model, tokenizer=…)")
        self.engine, self.settings = engine, settings
        self.prompts = Prompts(engine.tokenizer)
        self.began, self.draining, self.statuses = int(time.time()), False, Counter[int]()
        routes = [
            Route("/", self.page, methods=["GET"]),
            Route("/openapi.json", self.openapi, methods=["GET"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/ready", self.ready, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.model, methods=["GET"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chats, methods=["POST"]),
            Route("/v1/embeddings", self.embeddings, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/tokenizer_info", self.tokenizer_info, methods=["GET"]),
        ]
        shared: dict[str, Any] = dict(allow_methods=["*"], allow_headers=["*"], expose_headers=["X-Request-Id"])
        pages = [Middleware(CORSMiddleware, allow_origins=settings.origins, **shared)] if settings.origins else []
        errors = {HTTPException: _http_error, ApiError: told, EngineError: told, InputError: told}
        gate = Middleware(Gate, settings=settings, statuses=self.statuses)
        self.app = Starlette(routes=routes, middleware=[*pages, gate], exception_handlers=errors)
        self.app.router.redirect_slashes = False

    async def page(self, _: Request) -> Response:
        return Response(page(), headers=headers(), media_type="text/html; charset=utf-8")

    async def openapi(self, _: Request) -> Response:
        return Response(description(self.settings.names[0]), media_type="application/json")

    async def health(self, _: Request) -> Response:
        if not self.engine.healthy(self.settings.patience):
            raise ApiError(503, "the engine makes no progress")
        return Response(status_code=200)

    async def ready(self, _: Request) -> Response:
        if self.draining:
            raise ApiError(503, "the server is stopping")
        return await self.health(_)

    async def metrics(self, _: Request) -> Response:
        engine = replace(self.engine.metrics, model=self.settings.names[0])
        return Response(ServerMetrics(engine, self.statuses).prometheus(), media_type="text/plain; version=0.0.4")

    async def models(self, _: Request) -> Response:
        return _json(dict(object="list", data=[self._about(name) for name in self.settings.names]))

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return _json(self._about(request.path_params["name"]))

    async def completions(self, request: Request) -> Response:
        return await self._answered(request, self._complete)

    async def chats(self, request: Request) -> Response:
        return await self._answered(request, self._chat)

    async def embeddings(self, request: Request) -> Response:
        return await self._answered(request, self._embed)

    async def tokenize(self, request: Request) -> Response:
        return await self._answered(request, self._tokens)

    async def detokenize(self, request: Request) -> Response:
        return await self._answered(request, self._text)

    async def _answered(self, request: Request, answer: Callable[[bytes], Response]) -> Response:
        """Read a request's body, and let a thread make the response of it: bodies may be large, and others wait."""
        return await asyncio.to_thread(answer, await self._body(request))

    def _complete(self, body: bytes) -> Response:
        asked = fields_of(Completion, body)
        self._check_open(asked.model)
        handles = self._submit(asked, self.prompts.of_completion(asked))
        answer = CompletionAnswer(asked, self.settings.names[0], self.prompts, handles, asked.logprobs is not None)
        return self._reply(answer, asked.stream)

    def _chat(self, body: bytes) -> Response:
        asked = fields_of(Chat, body)
        self._check_open(asked.model)
        tools = tools_of(asked, self.prompts.template(tools=bool(asked.tools)), self.prompts.special)
        handles = self._submit(asked, [self.prompts.of_chat(asked, tools is not None)], tools)
        return self._reply(ChatAnswer(asked, self.settings.names[0], self.prompts, handles, tools), asked.stream)

    def _embed(self, body: bytes) -> Response:
        asked = fields_of(Embeddings, body)
        self._check_open(asked.model)
        found = self.prompts.of_embeddings(asked)
        self._check_count(len(found), "input", "input")
        embed = partial(self.engine.embed, priority=asked.priority or 0, cache_salt=asked.cache_salt or "")
        handles = _all_or_none(partial(embed, ids, self.settings.pooling) for ids in found)
        return self._reply(EmbeddingsAnswer(asked, self.settings.names[0], handles))

    def _reply(self, answer: Computed, stream: bool | None = False) -> Response:
        return (Stream if stream else Reply)(answer, self.settings.most_seconds)

    def _tokens(self, body: bytes) -> Response:
        asked = fields_of(Tokenize, body)
        self._check_model(asked.model)
        if (asked.prompt is None) == (asked.messages is None):
            raise ApiError(400, "there must be a prompt, or messages", param="prompt")
        if asked.prompt is None:
            tokens = self.prompts.of_chat(asked, bool(asked.tools))
        else:
            tokens = self.prompts.encoded(asked.prompt, asked.add_special_tokens is not False)
        return _json(dict(tokens=tokens, count=len(tokens), max_model_len=self.engine.longest))

    def _text(self, body: bytes) -> Response:
        asked = fields_of(Detokenize, body)
        self._check_model(asked.model)
        vocab = self.engine.vocab_size
        if wrong := [token for token in asked.tokens if token >= vocab]:
            raise ApiError(400, f"token ids must be from 0 to {vocab - 1}, got {wrong[0]}", param="tokens")
        return _json(dict(prompt=self.prompts.decoded(asked.tokens)))

    async def tokenizer_info(self, _: Request) -> Response:
        return _json(self.prompts.facts())

    def _about(self, name: str) -> dict[str, Any]:
        about = dict(id=name, object="model", created=self.began, owned_by="transformers_neuronx")
        return about | dict(root=self.settings.names[0], max_model_len=self.engine.longest)

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in self.settings.names:
            there = ", ".join(self.settings.names)
            raise ApiError(404, f"there is no model {name!r} here, only {there}", param="model", code="model_not_found")

    async def _body(self, request: Request) -> bytes:
        """Read a request's body. Its length may be unknown before."""
        body, most = bytearray(), self.settings.most_body
        async for part in request.stream():
            body += part
            if len(body) > most:
                raise ApiError(413, f"the body must have at most {most} bytes")
        return bytes(body)

    def _check_open(self, model: str | None) -> None:
        self._check_model(model)
        if self.draining:
            raise ApiError(503, "the server is stopping")

    def _check_count(self, count: int, what: str, param: str) -> None:
        if count > (most := self.settings.most_choices):
            raise ApiError(400, f"{what} must ask for at most {most} sequences, got {count}", param=param)

    def _submit(self, asked: Completion | Chat, prompts: list[list[int]], tools: Tools | None = None) -> list[Handle]:
        """Submit a request for each of its prompts, all or none."""
        self._check_count(len(prompts) * (asked.n or 1), "prompts and n", "n")
        if self.settings.logs_prompts:
            for ids in prompts:
                _LOG.info("prompt: %s", self.prompts.decoded(ids))
        longest, defaults = self.engine.longest, self.settings.defaults
        try:
            params = [params_of(asked, len(ids), longest, defaults, tools) for ids in prompts]
            return _all_or_none(partial(self.engine.submit, *each) for each in zip(prompts, params, strict=True))
        except GrammarError as error:
            raise no_grammar(asked, error) from error


class Computed(Protocol):
    """What an engine still computes."""

    def cancel(self) -> None:
        """End it now."""
        ...

    async def response(self) -> bytes:
        """Wait for it, and return the body of the response. Raises EngineError if it failed."""
        ...


class Reply(Response):
    """A response that an engine still computes. If the client goes away, or after `most` seconds, its requests end,
    whatever they are at.
    """

    def __init__(self, answer: Computed, most: float | None) -> None:
        self.answer, self.most = answer, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = asyncio.create_task(self._watch(receive))
        try:
            async with asyncio.timeout(self.most):
                await self._send(scope, receive, send)
        except TimeoutError:
            self.answer.cancel()  # first: who reads slowly would hold it up
            error = ApiError(504, f"the answer took longer than {self.most:g} seconds", code="timeout")
            await self._fail(error, scope, receive, send)
        finally:
            watch.cancel()
            self.answer.cancel()  # those that still run: nobody reads them

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.answer.cancel()

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = Response(await self.answer.response(), media_type="application/json")
        except EngineError as error:
            response = api_error(error).response()
        await response(scope, receive, send)

    async def _fail(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        await error.response()(scope, receive, send)


class Stream(Reply):
    """A response whose events are sent as they come."""

    answer: Answer

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send(dict(type="http.response.start", status=200, headers=headers))
        async for part in self.answer.events():
            await send(dict(type="http.response.body", body=part, more_body=True))
        await send(dict(type="http.response.body", body=b"", more_body=False))

    async def _fail(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        await send(dict(type="http.response.body", body=event(error.body), more_body=False))


def _all_or_none(submits: Iterable[Callable[[], Handle]]) -> list[Handle]:
    """Submit requests. If one is refused, the others are cancelled."""
    handles: list[Handle] = []
    try:
        for submit in submits:
            handles.append(submit())
    except Exception:
        for handle in handles:
            for choice in handle.choices:
                choice.cancel()
        raise
    return handles


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return ApiError(error.status_code, error.detail).response()
