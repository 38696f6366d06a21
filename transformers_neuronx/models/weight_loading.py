"""Brings the weights of a checkpoint or an artifact to the devices of a model, in whichever process they are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers_neuronx.engine.artifacts import Artifact
from transformers_neuronx.engine.decoder import Decoder
from transformers_neuronx.engine.loading import Progress
from transformers_neuronx.runtimes.remote import RemoteRuntime
from transformers_neuronx.weights.checkpoint import Checkpoint
from transformers_neuronx.weights.origin import Marked
from transformers_neuronx.weights.reading import Sharded


def fill(model: Any, decoder: Decoder, source: Artifact | Checkpoint, count: int, progress: Progress) -> None:
    """Load the `count` weights into a decoder of the model. `progress` is called with the name of each.

    Worker processes read their own pieces, unless the weights are only in the memory of this process.
    """
    runtime = decoder.runtime
    if not (isinstance(runtime, RemoteRuntime) and source.on_disk):
        weights, marked = incoming(decoder, source)
        decoder.take(weights, progress)
        decoder.origin = marked.marks
        return
    kind = type(model)
    told = dict(  # what models.worker needs to know
        kind=f"{kind.__module__}.{kind.__qualname__}",
        attributes=model.config.to_dict(),
        description=model.description,
        weights=str(source.directory),
    )
    with decoder.loading():
        tensors, decoder.origin = runtime.read(told, count, progress)
        decoder.weights.update(tensors)


def incoming(decoder: Decoder, source: Artifact | Checkpoint) -> tuple[Iterable[Sharded], Artifact | Marked]:
    """Return the weights for the decoder's devices, and what has the marks of those that were read."""
    if isinstance(source, Artifact):
        return source.weights(decoder), source
    source = source.with_tower if decoder.family.images else source
    marked = Marked(source, decoder.family.weights.PREFIX)
    return decoder.read(marked), marked
