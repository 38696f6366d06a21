"""The page that a server shows to people: chat with the model, and numbers of the server.

It is one self-contained response, which needs no network but its own server.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from importlib.resources import files


@cache
def page() -> bytes:
    """Return the page, as HTML."""
    parts = {kind: _read(f"page.{kind}") for kind in ("css", "js")}
    return re.sub("@(css|js)@", lambda found: parts[found[1]], _read("page.html")).encode()


@cache
def headers() -> Mapping[str, str]:
    """Return headers for it: it may run its own script and style, ask its own server, and be in no frame."""
    script, style = (_hash(_read(f"page.{kind}")) for kind in ("js", "css"))
    policy = (
        f"default-src 'none'; script-src {script}; style-src {style}; img-src data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return {
        "Content-Security-Policy": policy,
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
