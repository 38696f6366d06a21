"""What a server is set to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Settings:
    """What a server is set to.

    - `names`: names of the model, which requests may give; the first one is told.
    - `keys`: a request must have one of these as its bearer token. Default: none is needed.
    - `origins`: web pages of these origins may send requests; "*" allows all. Default: none.
    - `defaults`: values of fields that requests leave out, such as a checkpoint's `temperature`.
    - `most_body`: bytes of a request's body. Default 16 MiB.
    - `most_choices`: sequences of a request, of all its prompts together. Default 128.
    - `most_per_key`: requests of one key at a time, or of all if none is needed; more get 429. Default: any number.
    - `pooling`: how the hidden states of an input become its vector: "last", "mean" or "cls". Default "last".
    - `most_seconds`: time of a request, from its arrival to its end. Default: any.
    - `logs_prompts`: whether the log has the text of prompts. Default False.
    - `patience`: seconds without progress, after which /health fails while requests wait. Default 120.
    """

    names: Sequence[str]
    keys: Sequence[str] = ()
    origins: Sequence[str] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    most_body: int = 2**24
    most_choices: int = 128
    most_per_key: int | None = None
    pooling: str = "last"
    most_seconds: float | None = None
    logs_prompts: bool = False
    patience: float = 120.0
