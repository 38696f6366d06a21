"""What a model's encoder has read for the sequences of an engine: one place each, on the devices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from transformers_neuronx.engine.decoder import Decoder
from transformers_neuronx.engine.encoder_decoder import EncodeKey, EncoderDecoder
from transformers_neuronx.engine.loading import Progress
from transformers_neuronx.engine.programs import Programs
from transformers_neuronx.runtimes.base import DeviceTensor, Executable
from transformers_neuronx.serving.request import Request


class Sources:
    """The sources of a model without an encoder: there are none."""

    count = 0  # of programs

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.programs: Programs = decoder.programs

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
    """The sources of a model with an encoder, in so many `places`."""

    decoder: EncoderDecoder

    def __init__(self, decoder: EncoderDecoder, places: int) -> None:
        super().__init__(decoder)
        self._encoder = self.programs = decoder.programs.with_sources(places)
        self._keys = [EncodeKey(1, size) for size in decoder.options.buckets.sources]
        self._executables: dict[EncodeKey, Executable] = {}
        self.count = len(self._keys)

    def compile(self, progress: Progress) -> None:
        self._executables = self.decoder.store.compile_modules(self._keys, self._encoder.encode, progress)

    def reset(self) -> None:
        self._memory = [self.decoder.runtime.put([zeros]) for zeros in self._encoder.empty_memory()]

    def read(self, requests: Sequence[Request]) -> None:
        for request in requests:
            key, source = self.decoder.encoder(1, len(request.source)), np.array(request.source, np.int32)
            program, place = self._executables[key], request.places[:1]
            self._memory = self.decoder.encoded(program, key, [source], place, self._memory)

    def operands(self) -> list[DeviceTensor]:
        return self.decoder.operands(range(self.decoder.config.n_layer), memory=self._memory)


def sources_of(decoder: Decoder, places: int) -> Sources:
    """Return what holds the sources of a model."""
    return EncodedSources(decoder, places) if isinstance(decoder, EncoderDecoder) else Sources(decoder)
