"""Brings the weights of a checkpoint or an artifact to the devices of a model, in whichever process they are."""

from __future__ import annotations

from typing import Any

from transformers_neuronx.engine.artifacts import Artifact
from transformers_neuronx.engine.decoder import Decoder
from transformers_neuronx.engine.loading import Progress
from transformers_neuronx.runtimes.remote import RemoteRuntime
from transformers_neuronx.weights.checkpoint import Checkpoint
from transformers_neuronx.weights.origin import Marked
from transformers_neuronx.weights.reading import expand


def fill(model: Any, decoder: Decoder, source: Artifact | Checkpoint, progress: Progress) -> None:
    """Load weights into a decoder of the model. `progress` is called with the name of each.

    Worker processes read their own pieces, unless the weights are only in the memory of this process.
    """
    runtime = decoder.runtime
    if isinstance(runtime, RemoteRuntime) and source.on_disk:
        kind, count = type(model), len(list(expand(decoder.programs.table, decoder.programs.layers)))
        told = dict(
            {"class": f"{kind.__module__}.{kind.__qualname__}"},
            attributes=model.config.to_dict(),
            description=model.description,
            weights=str(source.directory),
        )
        with decoder.loading():
            decoder.weights.update(runtime.read(told, count, progress).tensors)
        return
    marked = source if isinstance(source, Artifact) else Marked(source, decoder.family.weights.PREFIX)
    decoder.take(marked.weights(decoder) if isinstance(marked, Artifact) else decoder.read(marked), progress)
    decoder.origin = marked.marks
