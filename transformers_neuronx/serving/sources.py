"""What a model's encoder has read for the sequences of an engine: one place each, on the devices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from transformers_neuronx.engine.decoder import Decoder
from transformers_neuronx.engine.encoder_decoder import EncodeKey, EncoderDecoder, EncoderDecoderPrograms
from transformers_neuronx.engine.loading import Progress
from transformers_neuronx.engine.store import ProgramStore
from transformers_neuronx.runtimes.base import DeviceTensor
from transformers_neuronx.serving.request import Request


class Sources:
    """The sources of a model without an encoder: there are none."""

    count = 0  # of programs

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    def compile(self, progress: Progress) -> None:
        """Compile the encoders."""

    def reset(self) -> None:
        """Forget all sources."""

    def read(self, requests: Sequence[Request]) -> None:
        """Encode the sources of requests, each to the first of its places."""
        assert not requests

    def operands(self) -> list[DeviceTensor]:
        """Return the weights of a step, and what it reads of the sources."""
        return self.decoder.operands(range(self.decoder.config.n_layer))


class EncodedSources(Sources):
    """The sources of a model with an encoder, in the places of a cache, for which `store` has the programs."""

    decoder: EncoderDecoder

    def __init__(self, decoder: EncoderDecoder, store: ProgramStore) -> None:
        self.decoder, self._store = decoder, store
        self._keys = [EncodeKey(1, size) for size in decoder.options.buckets.sources]
        self.count = len(self._keys)

    def compile(self, progress: Progress) -> None:
        self._store.compile(self._keys, progress)

    def reset(self) -> None:
        programs = self._store.programs
        assert isinstance(programs, EncoderDecoderPrograms)
        self._memory = [self.decoder.runtime.put([zeros]) for zeros in programs.empty_memory()]

    def read(self, requests: Sequence[Request]) -> None:
        for request in requests:
            key, source = self.decoder.encoder(1, len(request.source)), np.array(request.source, np.int32)
            [(_, program)] = self._store.parts(key)
            self._memory = self.decoder.encoded(program, key, [source], request.places[:1], self._memory)

    def operands(self) -> list[DeviceTensor]:
        return self.decoder.operands(range(self.decoder.config.n_layer), memory=self._memory)


def sources_of(decoder: Decoder, store: ProgramStore) -> Sources:
    """Return what holds the sources of a model, in a cache for which `store` has the programs."""
    return EncodedSources(decoder, store) if isinstance(decoder, EncoderDecoder) else Sources(decoder)
