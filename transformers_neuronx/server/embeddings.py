"""The answer to /v1/embeddings."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from transformers_neuronx.server.errors import ApiError
from transformers_neuronx.server.fields import Embeddings
from transformers_neuronx.serving.handles import Handle, changes


class EmbeddingsAnswer:
    """The vectors of inputs, of length 1, in the order of the inputs."""

    def __init__(self, asked: Embeddings, model: str, handles: Sequence[Handle]) -> None:
        self._asked, self._model, self._handles = asked, model, handles

    def cancel(self) -> None:
        """End all requests now."""
        for handle in self._handles:
            handle.cancel()

    async def response(self) -> bytes:
        """Wait for all vectors, and return the response. Raises EngineError if one failed."""
        async for _ in changes(self._handles):
            pass
        for handle in self._handles:
            handle.result()  # raises its error
        vectors = [self._told(handle.embedding) for handle in self._handles]
        data = [dict(object="embedding", index=index, embedding=vector) for index, vector in enumerate(vectors)]
        count = sum(handle.usage.prompt_tokens for handle in self._handles)
        usage = dict(prompt_tokens=count, total_tokens=count)
        return msgspec.json.encode(dict(object="list", data=data, model=self._model, usage=usage))

    def _told(self, vector: np.ndarray[Any, Any]) -> list[float] | str:
        most = self._asked.dimensions
        if most and most > len(vector):
            raise ApiError(400, f"dimensions must be at most {len(vector)}, got {most}", param="dimensions")
        kept = vector[:most].astype("<f4")
        kept /= max(np.linalg.norm(kept), np.finfo("f4").tiny)
        return base64.b64encode(kept.tobytes()).decode() if self._asked.encoding_format == "base64" else kept.tolist()
