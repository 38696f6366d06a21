"""Models that a server offers, by their names."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

from transformers_neuronx.errors import GrammarError, InputError
from transformers_neuronx.server.errors import ApiError
from transformers_neuronx.server.fields import Chat, Completion, Embeddings
from transformers_neuronx.server.parameters import no_grammar, params_of
from transformers_neuronx.server.prompts import Prompts
from transformers_neuronx.server.settings import Settings
from transformers_neuronx.server.tools import Tools
from transformers_neuronx.serving.engine import Engine
from transformers_neuronx.serving.handles import Handle

_LOG = logging.getLogger(__name__)


class ServedModel:
    """An engine, which must have a tokenizer, and what its requests may leave out.

    - `name`: what responses and metrics call it. Default: the class of the model.
    - `defaults`: values of fields that requests leave out, such as a checkpoint's `temperature`.
    - `pooling`: how the hidden states of an input become its vector: "last", "mean" or "cls".

    Raises InputError for an engine without a tokenizer.
    """

    def __init__(
        self, engine: Engine, name: str | None = None, defaults: Mapping[str, Any] | None = None, pooling: str = "last"
    ) -> None:
        if engine.tokenizer is None:
            raise InputError("a server needs an engine with a tokenizer: Engine(model, tokenizer=…)")
        self.engine, self.name = engine, engine.metrics.model if name is None else name
        self.defaults, self.pooling = defaults or {}, pooling
        self.prompts = Prompts(engine.tokenizer)
        self.root = self.name  # also where an adapter has another
        self.adapter: str | None = None  # of all requests

    def with_adapter(self, name: str) -> ServedModel:
        """Return the same model, whose requests have this adapter, and which is called so."""
        other = copy(self)
        other.name = other.adapter = name
        return other

    def submit(
        self, asked: Completion | Chat, prompts: Sequence[list[int]], settings: Settings, tools: Tools | None = None
    ) -> list[Handle]:
        """Submit a request for each prompt, all or none. Raises ApiError, and InputError for what cannot be served."""
        _check_count(len(prompts) * (asked.n or 1), settings, "prompts and n", "n")
        if settings.logs_prompts:
            for ids in prompts:
                _LOG.info("prompt: %s", self.prompts.decoded(ids))
        longest = self.engine.longest
        try:
            params = [params_of(asked, len(ids), longest, self.defaults, tools) for ids in prompts]
            params = [replace(each, adapter=self.adapter) for each in params] if self.adapter else params
            return _all_or_none(partial(self.engine.submit, *each) for each in zip(prompts, params, strict=True))
        except GrammarError as error:
            raise no_grammar(asked, error) from error

    def embed(self, asked: Embeddings, settings: Settings) -> list[Handle]:
        """Submit a request for the vector of each input, all or none. Raises as `submit` does."""
        inputs = self.prompts.of_embeddings(asked)
        _check_count(len(inputs), settings, "input", "input")
        how: dict[str, Any] = dict(
            priority=asked.priority or 0, cache_salt=asked.cache_salt or "", adapter=self.adapter
        )
        embed = partial(self.engine.embed, **how)
        return _all_or_none(partial(embed, ids, self.pooling) for ids in inputs)


def _check_count(count: int, settings: Settings, what: str, param: str) -> None:
    if count > (most := settings.most_choices):
        raise ApiError(400, f"{what} must ask for at most {most} sequences, got {count}", param=param)


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
