"""Logs of a server: as lines for people, or as JSON for programs."""

from __future__ import annotations

import logging
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

import msgspec

NUMBER: ContextVar[str] = ContextVar("NUMBER", default="")  # of the request that is answered, as X-Request-Id has it


class JsonLines(logging.Formatter):
    """One JSON object in a line for each record, with the fields that it has beside its message."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        told: dict[str, Any] = dict(time=when, level=record.levelname, message=record.getMessage())
        told |= dict(request=NUMBER.get()) if NUMBER.get() else {}
        told |= getattr(record, "fields", {})
        told |= dict(exception=self.formatException(record.exc_info)) if record.exc_info else {}
        return msgspec.json.encode(told).decode()


def begin(as_json: bool) -> None:
    """Let all logs go to the standard error output."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if as_json else logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.INFO)
