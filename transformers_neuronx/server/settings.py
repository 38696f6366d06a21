"""What a server is set to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """What a server is set to.

    - `keys`: a request must have one of these as its bearer token. Default: none is needed.
    - `origins`: web pages of these origins may send requests; "*" allows all. Default: none.
    - `most_body`: bytes of a request's body. Default 16 MiB.
    - `most_choices`: sequences of a request, of all its prompts together. Default 128.
    - `most_per_key`: requests of one key at a time, or of all if none is needed; more get 429. Default: any number.
    - `most_seconds`: time of a request, from its arrival to its end. Default: any.
    - `logs_prompts`: whether the log has the text of prompts. Default False.
    - `updates_adapters`: whether clients may load and unload adapters, by paths on this machine. Default False.
    - `patience`: seconds without progress, after which /health fails while requests wait. Default 120.
    """

    keys: Sequence[str] = ()
    origins: Sequence[str] = ()
    most_body: int = 2**24
    most_choices: int = 128
    most_per_key: int | None = None
    most_seconds: float | None = None
    logs_prompts: bool = False
    updates_adapters: bool = False
    patience: float = 120.0
