"""What the server takes and answers, for programs: an OpenAPI description."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from transformers_neuronx.server.errors import Body
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
)
from transformers_neuronx.server.gate import OPEN
from transformers_neuronx.version import __version__

JSON, EVENTS, TEXT, HTML = "application/json", "text/event-stream", "text/plain", "text/html"
SCHEMA_OF = {JSON: dict(type="object"), TEXT: dict(type="string"), HTML: dict(type="string")}
SCHEMAS = "#/components/schemas/"
ERRORS = {
    400: "What is wrong with the request, and with which field.",
    401: "The server needs a key, and the request has another one or none.",
    404: "The server has no such model.",
    408: "The body took longer than the server is set to allow.",
    413: "The body is too large.",
    429: "The key has too many requests at a time.",
    503: "The server is stopping, has too much to do, or cannot go on.",
    504: "The answer took longer than the server is set to allow.",
}


class Operation(NamedTuple):
    """A route: what it is for, the body of a request, an example of it, and the kinds of a response. One that `works`
    asks the engine, which may be unable to answer.
    """

    path: str
    summary: str
    kinds: tuple[str, ...] = (JSON,)
    works: bool = False
    body: type[Struct] | None = None
    example: Mapping[str, Any] = {}

    @property
    def errors(self) -> list[int]:
        """The statuses of its errors. Bodies may name the model, and some paths do."""
        found = {400: self.body, 401: self.path not in OPEN, 404: self.body or "{" in self.path}
        found |= {408: self.body, 413: self.body, 429: self.body, 503: self.works, 504: self.works and self.body}
        return [status for status, may_be in found.items() if may_be]

    def described(self, model: str) -> dict[str, Any]:
        """Return what OpenAPI says of it."""
        error = dict(content={JSON: dict(schema={"$ref": f"{SCHEMAS}{Body.__name__}"})})
        contents = {kind: dict(schema=SCHEMA_OF[kind]) if kind in SCHEMA_OF else {} for kind in self.kinds}
        responses = {"200": dict(description="The answer.") | (dict(content=contents) if contents else {})}
        responses |= {str(status): dict(description=ERRORS[status]) | error for status in self.errors}
        name = "_".join(re.findall(r"\w+", self.path))
        told: dict[str, Any] = dict(summary=self.summary, operationId=name, responses=responses)
        if names := re.findall(r"{(\w+)}", self.path):
            how = {"in": "path", "required": True, "schema": dict(type="string", examples=[model])}
            told["parameters"] = [dict(name=name) | how for name in names]
        if self.body:
            content = dict(
                schema={"$ref": SCHEMAS + self.body.__name__}, example=dict(model=model) | dict(self.example)
            )
            told["requestBody"] = dict(required=True, content={JSON: content})
        return told | (dict(security=[]) if self.path in OPEN else {})


PAIR_EXAMPLE = dict(text_1="Who made heaven?", text_2=["God created the heaven.", "He died."])
RANK_EXAMPLE = dict(query="Who made heaven?", documents=["God created the heaven.", "He died."])
TEXT_EXAMPLE, CHAT_EXAMPLE = "In the beginning", [dict(role="user", content="Who made heaven?")]
OPERATIONS = (
    Operation("/", "A page to chat with the model and to watch the server.", (HTML,)),
    Operation("/openapi.json", "This description."),
    Operation("/health", "Whether the engine works.", (), works=True),
    Operation("/ready", "Whether the server takes requests.", (), works=True),
    Operation("/metrics", "Numbers for Prometheus.", (TEXT,)),
    Operation("/v1/models", "The names of the model."),
    Operation("/v1/models/{name}", "The model, if it has this name."),
    Operation(
        "/v1/completions", "Continue texts. With `stream`, the answer is a stream of events.", (JSON, EVENTS), True,
        Completion, dict(prompt=TEXT_EXAMPLE, max_tokens=8),
    ),
    Operation(
        "/v1/chat/completions", "Answer a chat. With `stream`, the answer is a stream of events.", (JSON, EVENTS), True,
        Chat, dict(messages=CHAT_EXAMPLE, max_tokens=8),
    ),
    Operation(
        "/v1/embeddings", "Vectors of texts.", works=True, body=Embeddings, example=dict(input=TEXT_EXAMPLE)
    ),
    Operation("/classify", "Classes of texts.", works=True, body=Classify, example=dict(input=TEXT_EXAMPLE)),
    *(
        Operation(path, "Scores of pairs of texts.", works=True, body=Score, example=PAIR_EXAMPLE)
        for path in ("/score", "/v1/score")
    ),
    *(
        Operation(path, "Documents in the order of their scores.", works=True, body=Rerank, example=RANK_EXAMPLE)
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    ),
    Operation("/tokenize", "The token ids of a text or a chat.", body=Tokenize, example=dict(prompt=TEXT_EXAMPLE)),
    Operation("/detokenize", "The text of token ids.", body=Detokenize, example=dict(tokens=[300, 301])),
    Operation("/tokenizer_info", "What a client must know to make prompts itself."),
)  # fmt: skip

OF_ADAPTERS = (
    Operation(
        "/v1/load_lora_adapter", "Load an adapter from a directory of the server.", works=True, body=LoadAdapter,
        example=dict(lora_name="sql", lora_path="/models/sql"),
    ),
    Operation(
        "/v1/unload_lora_adapter", "Unload an adapter.", works=True, body=UnloadAdapter, example=dict(lora_name="sql"),
    ),
)  # fmt: skip


def description(model: str, adapters: bool = False) -> bytes:
    """Return the description of a server, as JSON, with the name of its model in examples. With `adapters`, clients may
    load some.
    """
    operations = OPERATIONS + OF_ADAPTERS * adapters
    bodies = [Body, *(each.body for each in operations if each.body)]
    _, schemas = msgspec.json.schema_components(bodies, ref_template=SCHEMAS + "{name}")
    paths = {each.path: {"post" if each.body else "get": each.described(model)} for each in operations}
    bearer = dict(type="http", scheme="bearer")
    told = dict(
        openapi="3.1.0", info=dict(title="transformers-neuronx", version=__version__), paths=paths,
        security=[{}, dict(bearer=[])],  # keys are needed only if the server is set to some
        components=dict(schemas=schemas, securitySchemes=dict(bearer=bearer)),
    )  # fmt: skip
    return msgspec.json.encode(told)
