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
from transformers_neuronx.server.fields import Chat, Classify, Completion, Embeddings, Judging, Rerank, Score
from transformers_neuronx.server.parameters import no_grammar, params_of
from transformers_neuronx.server.pictures import Pictures
from transformers_neuronx.server.prompts import Prompts
from transformers_neuronx.server.scores import Judgement
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
    - `pictures`: what reads the images of messages, for a model that does.

    Raises InputError for an engine without a tokenizer.
    """

    def __init__(
        self, engine: Engine, name: str | None = None, defaults: Mapping[str, Any] | None = None,
        pooling: str = "last", pictures: Pictures | None = None,
    ) -> None:  # fmt: skip
        if engine.tokenizer is None:
            raise InputError("a server needs an engine with a tokenizer: Engine(model, tokenizer=…)")
        self.engine, self.name = engine, engine.metrics.model if name is None else name
        self.defaults, self.pooling = defaults or {}, pooling
        self.prompts = Prompts(engine.tokenizer, pictures)
        self.root = self.name  # also where an adapter has another
        self.adapter: str | None = None  # of all requests

    def with_adapter(self, name: str) -> ServedModel:
        """Return the same model, whose requests have this adapter, and which is called so."""
        other = copy(self)
        other.name = other.adapter = name
        return other

    def submit(
        self, asked: Completion | Chat, prompts: Sequence[list[int]], settings: Settings, tools: Tools | None = None,
        images: Mapping[str, Any] | None = None,
    ) -> list[Handle]:  # fmt: skip
        """Submit a request for each prompt, with these images, all or none.

        Raises ApiError, and InputError for what cannot be served.
        """
        _check_count(len(prompts) * (asked.n or 1), settings, "prompts and n", "n")
        if settings.logs_prompts:
            for ids in prompts:
                _LOG.info("prompt: %s", self.prompts.decoded(ids))
        longest = self.engine.longest
        try:
            params = [params_of(asked, len(ids), longest, self.defaults, tools) for ids in prompts]
            params = [replace(each, adapter=self.adapter) for each in params] if self.adapter else params
            submit = partial(self.engine.submit, **images or {})
            return _all_or_none(partial(submit, *each) for each in zip(prompts, params, strict=True))
        except GrammarError as error:
            raise no_grammar(asked, error) from error

    def embed(self, asked: Embeddings, settings: Settings) -> list[Handle]:
        """Submit a request for the vector of each input, all or none. Raises as `submit` does."""
        inputs = self.prompts.of_embeddings(asked)
        _check_count(len(inputs), settings, "input", "input")
        return self._embedded(inputs, self._how(asked))

    def classify(self, asked: Classify, settings: Settings) -> Judgement:
        """Submit a request for the classes of each input, all or none. Raises as `submit` does."""
        inputs = self.prompts.of_embeddings(asked)
        _check_count(len(inputs), settings, "input", "input")
        return self._classified(inputs, asked)

    def judge(self, asked: Score | Rerank, pairs: Sequence[tuple[str, str]], settings: Settings) -> Judgement:
        """Submit requests for the scores of pairs of texts, all or none. Raises as `submit` does.

        A score head with one label reads both texts of a pair. A model without such a head makes vectors of them.
        """
        param = "documents" if isinstance(asked, Rerank) else "text_2"
        if not pairs:
            raise ApiError(400, f"{param} must have one text or more", param=param)
        labels = self.engine.labels
        if len(labels) > 1:
            raise ApiError(400, f"a score needs a model with one label, and this has {len(labels)}: use /classify")
        if labels:
            _check_count(len(pairs), settings, "pairs", param)
            return self._classified([self.prompts.of_pair(*pair) for pair in pairs], asked)
        texts = [*dict.fromkeys(text for pair in pairs for text in pair)]
        places = {text: place for place, text in enumerate(texts)}
        _check_count(len(texts), settings, "texts", param)
        handles = self._embedded([self.prompts.encoded(text) for text in texts], self._how(asked))
        return Judgement(handles, False, pairs=[(places[one], places[other]) for one, other in pairs])

    def _how(self, asked: Embeddings | Judging) -> dict[str, Any]:
        return dict(priority=asked.priority or 0, cache_salt=asked.cache_salt or "", adapter=self.adapter)

    def _embedded(self, inputs: Sequence[list[int]], how: Mapping[str, Any]) -> list[Handle]:
        embed = partial(self.engine.embed, **how)
        return _all_or_none(partial(embed, ids, self.pooling) for ids in inputs)

    def _classified(self, inputs: Sequence[list[int]], asked: Judging) -> Judgement:
        classify, kind = partial(self.engine.classify, **self._how(asked)), self.engine.problem_type
        handles = _all_or_none(partial(classify, ids) for ids in inputs)
        alone = len(self.engine.labels) == 1 or kind == "multi_label_classification"
        return Judgement(handles, asked.use_activation is not False and kind != "regression", alone)


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
