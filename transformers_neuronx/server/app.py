"""The application: routes, and what each of them does with the engine."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
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

from transformers_neuronx.errors import CheckpointError, EngineError, InputError
from transformers_neuronx.server.answers import Answer, ChatAnswer, CompletionAnswer, event
from transformers_neuronx.server.embeddings import EmbeddingsAnswer
from transformers_neuronx.server.errors import ApiError, api_error, told
from transformers_neuronx.server.fields import (
    Chat,
    Classify,
    Completion,
    Detokenize,
    Embeddings,
    LoadAdapter,
    Rerank,
    Score,
    Tokenize,
    UnloadAdapter,
    fields_of,
)
from transformers_neuronx.server.gate import Gate
from transformers_neuronx.server.metrics import ServerMetrics
from transformers_neuronx.server.models import ServedModel
from transformers_neuronx.server.openapi import description
from transformers_neuronx.server.page import headers, page
from transformers_neuronx.server.scores import ClassesAnswer, JudgementAnswer, RankingAnswer, pairs_of
from transformers_neuronx.server.settings import Settings
from transformers_neuronx.server.tools import tools_of
from transformers_neuronx.serving.engine import Engine


def app(engines: Engine | Mapping[str, Engine], **settings: Any) -> ASGIApp:
    """Return an ASGI application that answers with an engine, or with several, by the names that requests give.

    Engines must have tokenizers, and stay open. One may have several names; alone, it has that of its model's class.
    `settings` are those of `Settings`. Raises InputError for an engine without a tokenizer.
    """
    if isinstance(engines, Engine):
        engines = {engines.metrics.model: engines}
    models: dict[Engine, ServedModel] = {}
    for name, engine in engines.items():
        models.setdefault(engine, ServedModel(engine, name))
    return Server({name: models[engine] for name, engine in engines.items()}, Settings(**settings)).app


class Server:
    """The routes of a server of models, by their names. A request that names none is for the first one.

    With `draining`, it takes no more requests, and says that it is not ready.
    """

    def __init__(self, models: Mapping[str, ServedModel], settings: Settings) -> None:
        self.by_name, self.settings = models, settings
        self.served = list(dict.fromkeys(models.values()))  # without those under further names
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
            Route("/classify", self.classes, methods=["POST"]),
            *(Route(path, self.scores, methods=["POST"]) for path in ("/score", "/v1/score")),
            *(Route(path, self.ranking, methods=["POST"]) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/tokenizer_info", self.tokenizer_info, methods=["GET"]),
        ]
        if settings.updates_adapters:
            routes += [
                Route("/v1/load_lora_adapter", self.load_adapter, methods=["POST"]),
                Route("/v1/unload_lora_adapter", self.unload_adapter, methods=["POST"]),
            ]
        shared: dict[str, Any] = dict(allow_methods=["*"], allow_headers=["*"], expose_headers=["X-Request-Id"])
        pages = [Middleware(CORSMiddleware, allow_origins=settings.origins, **shared)] if settings.origins else []
        errors = {HTTPException: _http_error} | dict.fromkeys(
            (ApiError, CheckpointError, EngineError, InputError), told
        )
        gate = Middleware(Gate, settings=settings, statuses=self.statuses)
        self.app = Starlette(routes=routes, middleware=[*pages, gate], exception_handlers=errors)
        self.app.router.redirect_slashes = False

    @property
    def healthy(self) -> bool:
        """Whether all engines have nothing to do, or make progress."""
        return all(model.engine.healthy(self.settings.patience) for model in self.served)

    async def page(self, _: Request) -> Response:
        return Response(page(), headers=headers(), media_type="text/html; charset=utf-8")

    async def openapi(self, _: Request) -> Response:
        described = description(self.served[0].name, self.settings.updates_adapters)
        return Response(described, media_type="application/json")

    async def health(self, _: Request) -> Response:
        if not self.healthy:
            raise ApiError(503, "the engine makes no progress")
        return Response(status_code=200)

    async def ready(self, _: Request) -> Response:
        if self.draining:
            raise ApiError(503, "the server is stopping")
        if not all(model.engine.ready for model in self.served):
            raise ApiError(503, "worker processes start again")
        return await self.health(_)

    async def metrics(self, _: Request) -> Response:
        engines = [replace(model.engine.metrics, model=model.name) for model in self.served]
        return Response(ServerMetrics(engines, self.statuses).prometheus(), media_type="text/plain; version=0.0.4")

    async def models(self, _: Request) -> Response:
        return _json(dict(object="list", data=[self._about(name) for name in self._names]))

    async def model(self, request: Request) -> Response:
        return _json(self._about(request.path_params["name"]))

    async def completions(self, request: Request) -> Response:
        return await self._answered(request, self._complete)

    async def chats(self, request: Request) -> Response:
        return await self._answered(request, self._chat)

    async def embeddings(self, request: Request) -> Response:
        return await self._answered(request, self._embed)

    async def classes(self, request: Request) -> Response:
        return await self._answered(request, self._classify)

    async def scores(self, request: Request) -> Response:
        return await self._answered(request, self._score)

    async def ranking(self, request: Request) -> Response:
        return await self._answered(request, self._rank)

    async def tokenize(self, request: Request) -> Response:
        return await self._answered(request, self._tokens)

    async def detokenize(self, request: Request) -> Response:
        return await self._answered(request, self._text)

    async def load_adapter(self, request: Request) -> Response:
        return await self._answered(request, self._load)

    async def unload_adapter(self, request: Request) -> Response:
        return await self._answered(request, self._unload)

    async def _answered(self, request: Request, answer: Callable[[bytes], Response]) -> Response:
        """Read a request's body, and let a thread make the response of it: bodies may be large, and others wait."""
        most = self.settings.most_seconds
        deadline = request.state.deadline = None if most is None else asyncio.get_running_loop().time() + most
        try:
            async with asyncio.timeout_at(deadline):
                body = await self._body(request)
        except TimeoutError:
            raise ApiError(408, f"the body took longer than {most:g} seconds", code="timeout") from None
        return await asyncio.to_thread(answer, body)

    def _complete(self, body: bytes) -> Response:
        asked = fields_of(Completion, body)
        model = self._open_model(asked.model)
        handles = model.submit(asked, model.prompts.of_completion(asked), self.settings)
        answer = CompletionAnswer(asked, model.name, model.prompts, handles, asked.logprobs is not None)
        return self._reply(answer, asked.stream)

    def _chat(self, body: bytes) -> Response:
        asked = fields_of(Chat, body)
        model = self._open_model(asked.model)
        prompts = model.prompts
        tools = tools_of(asked, prompts.template(tools=bool(asked.tools)), prompts.special)
        ids, images = prompts.of_chat(asked, tools is not None)
        handles = model.submit(asked, [ids], self.settings, tools, images)
        return self._reply(ChatAnswer(asked, model.name, prompts, handles, tools), asked.stream)

    def _embed(self, body: bytes) -> Response:
        asked = fields_of(Embeddings, body)
        model = self._open_model(asked.model)
        return self._reply(EmbeddingsAnswer(asked, model.name, model.embed(asked, self.settings)))

    def _classify(self, body: bytes) -> Response:
        asked = fields_of(Classify, body)
        model = self._open_model(asked.model)
        judgement = model.classify(asked, self.settings)
        return self._reply(ClassesAnswer(model.name, judgement, model.engine.labels))

    def _score(self, body: bytes) -> Response:
        asked = fields_of(Score, body)
        model = self._open_model(asked.model)
        return self._reply(JudgementAnswer(model.name, model.judge(asked, pairs_of(asked), self.settings)))

    def _rank(self, body: bytes) -> Response:
        asked = fields_of(Rerank, body)
        model = self._open_model(asked.model)
        pairs = [(asked.query, document) for document in asked.documents]
        return self._reply(RankingAnswer(model.name, model.judge(asked, pairs, self.settings), asked))

    def _load(self, body: bytes) -> Response:
        asked = fields_of(LoadAdapter, body)
        if asked.lora_name in self.by_name:
            raise ApiError(400, f"{asked.lora_name!r} is the name of a model", param="lora_name")
        self._open_model(asked.model).engine.load_adapter(asked.lora_name, asked.lora_path)
        return _json(f"Success: LoRA adapter '{asked.lora_name}' added successfully.")

    def _unload(self, body: bytes) -> Response:
        asked = fields_of(UnloadAdapter, body)
        self._open_model(asked.model).engine.unload_adapter(asked.lora_name)
        return _json(f"Success: LoRA adapter '{asked.lora_name}' removed successfully.")

    def _reply(self, answer: Computed, stream: bool | None = False) -> Response:
        return (Stream if stream else Reply)(answer, self.settings.most_seconds)

    def _tokens(self, body: bytes) -> Response:
        asked = fields_of(Tokenize, body)
        model = self._model(asked.model)
        if (asked.prompt is None) == (asked.messages is None):
            raise ApiError(400, "there must be a prompt, or messages", param="prompt")
        if asked.prompt is None:
            tokens, _ = model.prompts.of_chat(asked, bool(asked.tools))
        else:
            tokens = model.prompts.encoded(asked.prompt, asked.add_special_tokens is not False)
        return _json(dict(tokens=tokens, count=len(tokens), max_model_len=model.engine.longest))

    def _text(self, body: bytes) -> Response:
        asked = fields_of(Detokenize, body)
        model = self._model(asked.model)
        vocab = model.engine.vocab_size
        if wrong := [token for token in asked.tokens if token >= vocab]:
            raise ApiError(400, f"token ids must be from 0 to {vocab - 1}, got {wrong[0]}", param="tokens")
        return _json(dict(prompt=model.prompts.decoded(asked.tokens)))

    async def tokenizer_info(self, request: Request) -> Response:
        return _json(self._model(request.query_params.get("model")).prompts.facts())

    @property
    def _names(self) -> list[str]:
        """The names of all models, and of the adapters that they have now."""
        return [*self.by_name, *(name for model in self.served for name in model.engine.adapters)]

    def _about(self, name: str) -> dict[str, Any]:
        model = self._model(name)
        about = dict(id=name, object="model", created=self.began, owned_by="transformers_neuronx")
        about["capabilities"] = ["completion"] + ["multimodal"] * model.prompts.reads_images  # llama.cpp's names
        parent = dict(parent=model.root) if model.adapter else {}
        return about | dict(root=model.root, max_model_len=model.engine.longest) | parent

    def _model(self, name: str | None) -> ServedModel:
        if name is None:
            return self.served[0]
        if name in self.by_name:
            return self.by_name[name]
        for model in self.served:
            if name in model.engine.adapters:
                return model.with_adapter(name)
        there = ", ".join(self._names)
        raise ApiError(404, f"there is no model {name!r} here, only {there}", param="model", code="model_not_found")

    def _open_model(self, name: str | None) -> ServedModel:
        model = self._model(name)
        if self.draining:
            raise ApiError(503, "the server is stopping")
        return model

    async def _body(self, request: Request) -> bytes:
        """Read a request's body. Its length may be unknown before."""
        body, most = bytearray(), self.settings.most_body
        async for part in request.stream():
            body += part
            if len(body) > most:
                raise ApiError(413, f"the body must have at most {most} bytes")
        return bytes(body)


class Computed(Protocol):
    """What an engine still computes."""

    def cancel(self) -> None:
        """End it now."""
        ...

    async def response(self) -> bytes:
        """Wait for it, and return the body of the response. Raises EngineError if it failed."""
        ...


class Reply(Response):
    """A response that an engine still computes. If the client goes away, or after `most` seconds from the request's
    arrival, its requests end, whatever they are at. The request's state has that deadline, as a time of the loop.
    """

    def __init__(self, answer: Computed, most: float | None) -> None:
        self.answer, self.most = answer, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = asyncio.create_task(self._watch(receive))
        try:
            async with asyncio.timeout_at(scope["state"]["deadline"]):
                await self._begin(send)
                await asyncio.sleep(0)  # a deadline that has passed ends even an answer that needs no waiting
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

    async def _begin(self, send: Send) -> None:
        """Send what does not depend on the answer."""

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

    async def _begin(self, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send(dict(type="http.response.start", status=200, headers=headers))

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        async for part in self.answer.events():
            await send(dict(type="http.response.body", body=part, more_body=True))
        await send(dict(type="http.response.body", body=b"", more_body=False))

    async def _fail(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        await send(dict(type="http.response.body", body=event(error.body), more_body=False))


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return ApiError(error.status_code, error.detail).response()
