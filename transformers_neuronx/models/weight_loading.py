"""Brings the weights of a checkpoint or an artifact to the devices of a model, in whichever process they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers_neuronx.engine.artifacts import Artifact
from transformers_neuronx.engine.decoder import Decoder
from transformers_neuronx.engine.loading import Progress, put_all
from transformers_neuronx.runtimes.base import DeviceTensor
from transformers_neuronx.runtimes.remote import RemoteRuntime
from transformers_neuronx.weights.checkpoint import Checkpoint
from transformers_neuronx.weights.origin import Marked, Marks
from transformers_neuronx.weights.reading import Key, expand

Weights = tuple[Mapping[Key, DeviceTensor], Marks]  # and marks of the checkpoint that they are from


def fill(model: Any, decoder: Decoder, source: Artifact | Checkpoint, progress: Progress) -> None:
    """Load weights into a decoder of the model. `progress` is called with the name of each.

    Worker processes read their own pieces, unless the weights are only in the memory of this process.
    """
    runtime = decoder.runtime
    elsewhere = isinstance(runtime, RemoteRuntime) and source.on_disk
    with decoder.loading():
        weights, decoder.origin = (_far if elsewhere else near)(model, decoder, source, progress)
        decoder.weights.update(weights)


def near(_: Any, decoder: Decoder, source: Artifact | Checkpoint, progress: Progress) -> Weights:
    """Read weights here, and put them on the devices."""
    if isinstance(source, Artifact):
        return put_all(decoder.runtime, source.weights(decoder), progress), source.marks
    marked = Marked(source, decoder.family.weights.PREFIX)
    return put_all(decoder.runtime, decoder.read(marked), progress), marked.marks


def _far(model: Any, decoder: Decoder, source: Artifact | Checkpoint, progress: Progress) -> Weights:
    """Let workers read weights: `models.worker` does it."""
    runtime, kind = decoder.runtime, type(model)
    assert isinstance(runtime, RemoteRuntime)
    told = dict(
        kind=f"{kind.__module__}.{kind.__qualname__}",
        attributes=model.config.to_dict(),
        description=model.description,
        weights=str(source.directory),
    )
    count = len(list(expand(decoder.programs.table, decoder.programs.layers)))
    return runtime.read(told, count, progress)
