"""Runs an engine's steps where attention cannot read pages: a page is a slot of the model's own cache.

The work of a step is packed into the model's own programs: rectangles of a prompt's tokens, and single tokens of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from transformers_neuronx.engine.decoder import Decoder
from transformers_neuronx.engine.encoder_decoder import EncoderDecoder
from transformers_neuronx.engine.feeding import feed, sample_after
from transformers_neuronx.engine.inputs import Rows
from transformers_neuronx.engine.loading import Progress
from transformers_neuronx.layers.sampling import POLICY_COLUMNS
from transformers_neuronx.serving.choices import Changes, Chooser, Chosen, sampled_rows
from transformers_neuronx.serving.kv_cache import Copy
from transformers_neuronx.serving.request import Request
from transformers_neuronx.serving.scheduler import Work
from transformers_neuronx.serving.sources import Sources

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Chunks(Rows):
    """Rows that are a part of their sequences: `ends` are the lengths of the whole ones."""

    ends: Array

    @property
    def end(self) -> Array:
        return self.ends


@dataclass(frozen=True)
class PackedRows:
    """A step as rows; the row `sampling[i]` samples for `requests[i]`."""

    rows: Chunks
    sampling: list[int]
    requests: list[Request]


class SlotSources(Sources):
    """What an encoder has read for the model's own slots."""

    def read(self, requests: Sequence[Request]) -> None:
        if requests:
            assert isinstance(self.decoder, EncoderDecoder)
            sources = [np.array(request.source, np.int32) for request in requests]
            self.decoder.encode(sources, np.array([_slot(request) for request in requests]))


class SlotSteps:
    """The steps of one model over its slots, for one thread; nobody else may call the model."""

    overlaps = False

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.sources = SlotSources(decoder)
        self.chooser = Chooser(decoder, [decoder.slots])

    @property
    def programs(self) -> int:
        """Number of programs that `compile` compiles."""
        return len(self.chooser.keys)

    def compile(self, progress: Progress) -> None:
        """Compile the choice of tokens. The model has all other programs."""
        self.chooser.compile(progress)

    def longest_joined(self) -> int:
        """Return the most prompt tokens that one program of the model takes."""
        return max([1, *self.decoder.options.buckets.context])

    def most_rounds(self) -> int:
        """Return 1: a step generates one token of each row."""
        return 1

    def reset(self) -> None:
        """Forget all sequences."""
        self.decoder.reset()

    def copy(self, copies: Sequence[Copy]) -> None:
        """Do nothing: a page is a whole sequence, so none begins like another."""
        assert not copies

    def pack(self, step: Sequence[Work]) -> PackedRows:
        """Bring a step into the form of the model's programs."""
        tokens = [np.array(work.tokens, np.int64) for work in step]
        start, ends, slots = np.array([(work.start, work.ends[-1], _slot(work.request)) for work in step]).T
        rows = Chunks(tokens, start, np.ones((len(step), 1), bool), slots, ends)
        sampling = [place for place, work in enumerate(step) if work.samples]
        requests = [step[place].request for place in sampling]
        return PackedRows(rows, sampling, requests)

    def start(self, packed: PackedRows) -> PackedRows:
        """Do nothing: the choice of tokens decides which programs run."""
        return packed

    def changes(self, packed: PackedRows) -> Changes | None:
        """Return how logits change before tokens are chosen, if the host must see them."""
        if all(not request.adjusts and request.params.logprobs is None for request in packed.requests):
            return None
        return Changes.of(packed.requests, self.decoder.slots, self.decoder.config.vocab_size)

    def choose(self, packed: PackedRows, changes: Changes | None) -> Chosen:
        """Run a step, and choose tokens."""
        rows, put = packed.sampling, self.decoder.runtime.put
        samples = sampled_rows(packed.requests, self.decoder.slots)
        if changes is None:
            every = np.zeros((len(packed.rows.tokens), POLICY_COLUMNS), np.int32)
            every[rows] = samples["policy"][: len(rows)]
            tokens = sample_after(self.decoder, packed.rows, every)[rows]
            return Chosen(packed.requests, put([tokens.astype(np.int32)]), [])
        found = np.zeros((self.decoder.slots, 1, self.decoder.config.vocab_size), np.float32)
        found[: len(rows)] = feed(self.decoder, packed.rows)[rows]
        logits = put([found])
        return self.chooser.chosen(packed.requests, self.chooser.choose(logits, samples, changes), logits)


def _slot(request: Request) -> int:
    return request.tables[0][0] - 1
