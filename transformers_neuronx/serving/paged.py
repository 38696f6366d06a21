"""Runs an engine's steps over pages: its programs, and the cache on the devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from transformers_neuronx.decoder import Decoder
from transformers_neuronx.layers.step import SEGMENT
from transformers_neuronx.pyhlo.dtypes import element_type
from transformers_neuronx.runtimes.base import DeviceTensor, Executable
from transformers_neuronx.serving.choices import Choices, Chooser, compiled
from transformers_neuronx.serving.pages import NO_PAGE, Pages
from transformers_neuronx.serving.scheduler import Limits, Work
from transformers_neuronx.serving.steps import TOKEN, TokensKey, keys_of, smallest, step_module

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class PackedTokens:
    """A step in the form of its program: see `steps`."""

    key: TokensKey
    tokens: Array
    segments: Array
    samples: Array
    choices: Choices


class PagedSteps:
    """The steps of one model over pages. Only one thread may call `run`."""

    def __init__(self, decoder: Decoder, pages: Pages, limits: Limits) -> None:
        self.decoder = decoder
        self.layout = replace(decoder.programs.cache, slots=pages.count + 1, positions=pages.size, by_position=False)
        self.keys = keys_of(limits.tokens, limits.rows, pages.needed(limits.positions))
        self.chooser = Chooser(decoder, sorted({key.samples for key in self.keys} - {0}))
        self._programs: dict[TokensKey, Executable] = {}
        self.reset()

    def compile(self) -> None:
        """Compile all programs."""
        programs = self.decoder.programs
        self._programs = compiled(self.decoder, self.keys, lambda key: step_module(programs, self.layout, key))
        self.chooser.compile()

    def reset(self) -> None:
        """Fill the cache with zeros."""
        zeros = [np.zeros(a.sizes, element_type(a.dtype).numpy) for a in self.layout.arrays]
        layers = range(self.decoder.config.n_layer)
        self.caches: list[DeviceTensor] = [self.decoder.runtime.put([each]) for _ in layers for each in zeros]

    def pack(self, step: Sequence[Work]) -> PackedTokens:
        """Bring a step into the form of its program."""
        sampling = [work for work in step if work.samples]
        key = smallest(self.keys, sum(work.count for work in step), len(sampling))
        tokens = np.zeros((key.tokens, TOKEN), np.int32)
        segments = np.full((key.segments, SEGMENT + key.pages), NO_PAGE, np.int32)
        segments[:, :SEGMENT] = 0
        samples, first = [], 0
        for segment, work in zip(segments, step, strict=False):
            pages, last = work.request.pages, first + work.count
            tokens[first:last] = np.stack([work.tokens, work.positions, work.ends], 1)
            segment[:SEGMENT] = first, work.count, work.start, work.of_prompt
            segment[SEGMENT : SEGMENT + len(pages)] = pages
            samples += [last - 1] * work.samples
            first = last
        chosen = np.zeros(key.samples, np.int32)
        chosen[: len(samples)] = samples
        requests = [work.request for work in sampling]
        return PackedTokens(
            key, tokens, segments, chosen, Choices.of(requests, key.samples, self.decoder.config.vocab_size)
        )

    def run(self, packed: PackedTokens) -> dict[int, int]:
        """Run a step. Return the token sampled for each request, by its id, or BROKEN."""
        put, samples = self.decoder.runtime.put, [packed.samples] if packed.key.samples else []
        operands = [put([each]) for each in (packed.tokens, packed.segments, *samples)]
        weights = self.decoder.operands(range(self.decoder.config.n_layer))
        results = self._programs[packed.key](*operands, *self.caches, *weights)
        self.caches = results[len(samples) :]
        return self.chooser.choose(results[0], packed.choices) if packed.choices.requests else {}
