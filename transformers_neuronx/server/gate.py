"""What every request passes before it is routed: its number, its key and how many have it, the size of its body."""

from __future__ import annotations

import base64
import hmac
import logging
import re
from collections import Counter
from collections.abc import MutableMapping
from secrets import token_hex
from time import perf_counter
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from transformers_neuronx.server.errors import ApiError, api_error
from transformers_neuronx.server.logs import NUMBER
from transformers_neuronx.server.settings import Settings

_LOG = logging.getLogger(__name__)
OPEN = ("/health", "/ready")  # paths that need no key
POLLED = (*OPEN, "/metrics")  # asked for every few seconds
GONE = 499  # the client went away before there was a response
Message = MutableMapping[str, Any]


class Gate:
    """An ASGI application around another one. `statuses` counts its responses."""

    def __init__(self, app: ASGIApp, settings: Settings, statuses: Counter[int]) -> None:
        self.app, self.settings, self.statuses = app, settings, statuses
        self.answered = Counter[bytes]()  # requests of each key that are answered now

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers, began, status = Headers(scope=scope), perf_counter(), 0
        given = headers.get("x-request-id", "")
        number = given if re.fullmatch(r"[\w.:-]{1,128}", given, re.ASCII) else token_hex(16)
        path = scope["path"].removeprefix(scope.get("root_path", ""))  # of a server inside of another
        key = _key_of(headers.get("authorization", "")) if self.settings.keys else b""
        counted = Counter([key]) if scope["method"] == "POST" else Counter()
        NUMBER.set(number)

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = number
            await send(message)

        self.answered += counted
        try:
            refused = self._refused(scope["method"], path, key, headers)
            await (refused.response() if refused else self.app)(scope, receive, sent)
        except ClientDisconnect:
            pass  # before its whole body was there
        except Exception as error:
            _LOG.exception("request %s failed", number)
            if not status:  # otherwise a part of the response was sent: the connection is closed
                await api_error(error).response()(scope, receive, sent)
        finally:
            self.answered -= counted  # which forgets keys without a request
            status = status or GONE
            self.statuses[status] += 1
            seconds = perf_counter() - began
            fields = dict(method=scope["method"], path=scope["path"], status=status, seconds=round(seconds, 3))
            level = logging.DEBUG if path in POLLED and status == 200 else logging.INFO
            _LOG.log(level, "%s %s", " ".join(map(str, fields.values())), number, extra=dict(fields=fields))

    def _refused(self, method: str, path: str, key: bytes, headers: Headers) -> ApiError | None:
        settings, most = self.settings, self.settings.most_body
        if path in OPEN or method == "OPTIONS":
            return None
        if settings.keys:
            # All are compared, so that the time does not tell which one is nearest.
            known = [hmac.compare_digest(key, each.encode()) for each in settings.keys]
            if not any(known):
                message = "this server needs an API key: Authorization: Bearer KEY"
                return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": _wanted(headers)})
        if settings.most_per_key and method == "POST" and self.answered[key] > settings.most_per_key:
            message = f"a key may have at most {settings.most_per_key} requests at a time"
            return ApiError(429, message, code="rate_limit_exceeded")
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > most:
            return ApiError(413, f"the body must have at most {most} bytes, got {length}")
        return None


def _key_of(authorization: str) -> bytes:
    """Return the key in a header: a bearer token, or the password that a browser asked its user for."""
    kind, _, given = authorization.partition(" ")
    match kind.lower():
        case "bearer":
            return given.strip().encode()
        case "basic":
            try:
                return base64.b64decode(given, validate=True).partition(b":")[2]
            except ValueError:
                return b""
    return b""


def _wanted(headers: Headers) -> str:
    """Return which kind of key a client is asked for. A browser that opens a page asks its user for a password."""
    page = "text/html" in headers.get("accept", "")
    return 'Basic realm="API key as the password", charset="UTF-8"' if page else "Bearer"
