"""What a client is told when a request fails: a status, and a body as OpenAI's clients read it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from transformers_neuronx.errors import CheckpointError, EngineError, InputError, QueueFullError

RETRY_AFTER = 1  # seconds
KINDS = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class Detail(msgspec.Struct):
    """What is wrong, and with which field."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class Body(msgspec.Struct):
    """The body of every response that is an error."""

    error: Detail


class ApiError(Exception):
    """An error with its HTTP status."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        kind = KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.status, self.body = status, Body(Detail(message, kind, param, code))
        self.headers = dict(headers or ())
        if status in (429, 503):
            self.headers["Retry-After"] = str(RETRY_AFTER)

    def response(self) -> Response:
        """Return the response. Where the client may try again, it says when."""
        return Response(self.encoded, self.status, self.headers, "application/json")

    @property
    def encoded(self) -> bytes:
        """The body as JSON."""
        return msgspec.json.encode(self.body)


def api_error(error: Exception) -> ApiError:
    """Return what a client is told of an error of the engine."""
    match error:
        case ApiError():
            return error
        case QueueFullError():
            return ApiError(503, str(error), code="queue_full")
        case InputError() | CheckpointError() | EngineError(__cause__=InputError()):
            return ApiError(400, str(error))
        case EngineError():
            return ApiError(503, str(error))
    return ApiError(500, "an unexpected error; the server's log has it")


async def told(_: Request, error: Exception) -> Response:
    """Be an exception handler of Starlette."""
    return api_error(error).response()
