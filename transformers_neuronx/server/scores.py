"""Answers of score heads: classes of inputs, scores of pairs, and documents in the order of their scores."""

from __future__ import annotations

import time
from collections.abc import Sequence
from secrets import token_hex
from typing import Any, NamedTuple

import msgspec
import numpy as np

from transformers_neuronx.server.errors import ApiError
from transformers_neuronx.server.fields import Rerank, Score
from transformers_neuronx.serving.handles import Handle, changes

Array = np.ndarray[Any, Any]


def pairs_of(asked: Score) -> list[tuple[str, str]]:
    """Return the pairs of a request. Raises ApiError for two lists of unequal lengths."""
    one, other = ([texts] if isinstance(texts, str) else texts for texts in (asked.text_1, asked.text_2))
    if len(one) == len(other):
        return list(zip(one, other, strict=True))
    if 1 in (len(one), len(other)) and one and other:
        return [(first, second) for first in one for second in other]
    wanted = f"one text, or as many as text_1 has ({len(one)})"
    raise ApiError(400, f"text_2 must have {wanted}, got {len(other)}", param="text_2")


class Judgement(NamedTuple):
    """Requests that judge inputs or pairs of texts.

    With `pairs`, the requests make vectors, and a pair is judged by the cosine of two of these. Otherwise each has the
    logits of a score head. These become probabilities if it `activates`: by a softmax, or each by itself (a sigmoid) if
    there is one label or a text may have several.
    """

    handles: Sequence[Handle]
    activates: bool
    alone: bool = False
    pairs: Sequence[tuple[int, int]] | None = None

    def cosines(self, pairs: Sequence[tuple[int, int]]) -> list[Array]:
        vectors = np.stack([handle.embedding for handle in self.handles])
        vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.finfo("f4").tiny)
        return [vectors[one] @ vectors[other, :, None] for one, other in pairs]

    @property
    def numbers(self) -> list[Array]:
        """For each input or pair, f32[labels], once all have ended."""
        if self.pairs is not None:
            return self.cosines(self.pairs)
        found = [handle.logits.astype(np.float32) for handle in self.handles]
        if not self.activates:
            return found
        if self.alone:
            return [1 / (1 + np.exp(-each)) for each in found]
        powers = [np.exp(each - each.max()) for each in found]
        return [each / each.sum() for each in powers]


class JudgementAnswer:
    """What a response to a request of this kind has in common."""

    prefix = "score"

    def __init__(self, model: str, judgement: Judgement) -> None:
        self._judgement = judgement
        self._about = dict(id=f"{self.prefix}-{token_hex(12)}", created=int(time.time()), model=model)

    def cancel(self) -> None:
        """End all requests now."""
        for handle in self._judgement.handles:
            handle.cancel()

    async def response(self) -> bytes:
        """Wait for all numbers, and return the response. Raises EngineError if a request failed."""
        handles = self._judgement.handles
        async for _ in changes(handles):
            pass
        for handle in handles:
            handle.result()  # raises its error
        count = sum(handle.usage.prompt_tokens for handle in handles)
        usage = dict(prompt_tokens=count, total_tokens=count)
        return msgspec.json.encode(self._about | dict(usage=usage) | self.told(self._judgement.numbers))

    def told(self, numbers: Sequence[Array]) -> dict[str, Any]:
        """Return what the response says of the numbers."""
        scores = [dict(index=index, object="score", score=float(each[0])) for index, each in enumerate(numbers)]
        return dict(object="list", data=scores)


class ClassesAnswer(JudgementAnswer):
    """The likeliest label of each input, and the numbers of all labels."""

    prefix = "classify"

    def __init__(self, model: str, judgement: Judgement, labels: Sequence[str]) -> None:
        super().__init__(model, judgement)
        self._labels = labels

    def told(self, numbers: Sequence[Array]) -> dict[str, Any]:
        classes = [
            dict(index=index, label=self._labels[int(each.argmax())], probs=each.tolist(), num_classes=len(each))
            for index, each in enumerate(numbers)
        ]
        return dict(object="list", data=classes)


class RankingAnswer(JudgementAnswer):
    """Documents by their scores, the best first."""

    prefix = "rerank"

    def __init__(self, model: str, judgement: Judgement, asked: Rerank) -> None:
        super().__init__(model, judgement)
        self._asked = asked

    def told(self, numbers: Sequence[Array]) -> dict[str, Any]:
        scores, documents = [float(each[0]) for each in numbers], self._asked.documents
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: self._asked.top_n]
        results: list[dict[str, Any]] = [dict(index=index, relevance_score=scores[index]) for index in order]
        if self._asked.return_documents is not False:
            results = [each | dict(document=dict(text=documents[each["index"]])) for each in results]
        return dict(results=results)
