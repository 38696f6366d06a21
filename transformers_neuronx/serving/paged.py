"""Runs an engine's steps: its programs, and the cache in pages on the devices."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from transformers_neuronx.decoder import Decoder
from transformers_neuronx.keys import ProgramKey
from transformers_neuronx.layers.sampling import POLICY_COLUMNS
from transformers_neuronx.layers.step import SEGMENT
from transformers_neuronx.pyhlo.dtypes import element_type
from transformers_neuronx.rules import Rules
from transformers_neuronx.runtimes.base import DeviceTensor, Executable
from transformers_neuronx.serving.pages import NO_PAGE, Pages
from transformers_neuronx.serving.request import Request
from transformers_neuronx.serving.scheduler import Limits, Work
from transformers_neuronx.serving.steps import TOKEN, ChooseKey, LogprobsKey, TokensKey, keys_of, module, smallest

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Packed:
    """A step in the form of its program: see `steps`. `requests` are those that sample, in the order of the logits."""

    key: TokensKey
    tokens: Array
    segments: Array
    samples: Array
    requests: list[Request]
    policies: Array
    added: Array | None
    seen: Array | None


class PagedSteps:
    """The steps of one model over pages. Only one thread may call `run`."""

    def __init__(self, decoder: Decoder, pages: Pages, limits: Limits) -> None:
        self.decoder, self.pages, self.limits = decoder, pages, limits
        self.vocab = decoder.config.vocab_size
        layout = decoder.programs.cache
        self.layout = replace(layout, slots=pages.count + 1, positions=pages.size, by_position=False)
        self.keys = keys_of(limits.tokens, limits.rows, pages.needed(limits.positions))
        self._programs: dict[ProgramKey, Executable] = {}
        self.reset()

    def compile(self) -> None:
        """Compile all programs, several at once."""

        def build(key: ProgramKey) -> Executable:
            written = module(self.decoder.programs, self.layout, key)
            written.name = key.name
            return self.decoder.build(written)

        with ThreadPoolExecutor(self.decoder.options.workers or os.cpu_count()) as pool:
            self._programs = dict(zip(self.keys, pool.map(build, self.keys), strict=True))

    def reset(self) -> None:
        """Fill the cache with zeros."""
        zeros = [np.zeros(a.sizes, element_type(a.dtype).numpy) for a in self.layout.arrays]
        layers = range(self.decoder.config.n_layer)
        self.caches: list[DeviceTensor] = [self.decoder.runtime.put([each]) for _ in layers for each in zeros]

    def pack(self, step: Sequence[Work]) -> Packed:
        """Bring a step into the form of its program."""
        sampling = [work for work in step if work.samples]
        key = smallest(self.keys, sum(work.count for work in step), len(sampling))
        tokens = np.zeros((key.tokens, TOKEN), np.int32)
        segments = np.zeros((key.segments, SEGMENT + key.pages), np.int32)
        samples, first = np.zeros(key.samples, np.int32), 0
        for place, work in enumerate(step):
            request, last = work.request, first + work.count
            tokens[first:last, 0] = request.tokens[work.start : work.start + work.count]
            tokens[first:last, 1] = np.arange(work.start, work.start + work.count)
            tokens[first:last, 2] = len(request.tokens)
            segments[place, :SEGMENT] = first, work.count, work.start, work.of_prompt
            segments[place, SEGMENT:] = NO_PAGE
            segments[place, SEGMENT : SEGMENT + len(request.pages)] = request.pages
            if work.samples:
                samples[sampling.index(work)] = last - 1
            first = last
        requests = [work.request for work in sampling]
        return Packed(key, tokens, segments, samples, requests, *self._choices(key.samples, requests))

    def _choices(self, rows: int, requests: list[Request]) -> tuple[Array, Array | None, Array | None]:
        """Return the positions and policies of rows that sample, and what changes their logits, if anything does."""
        policies = np.zeros((rows, 1 + POLICY_COLUMNS), np.int32)
        policies[:, 1:] = _GREEDY
        for row, request in enumerate(requests):
            policies[row, 0] = len(request.tokens)
            policies[row, 1:] = request.policy
        if not any(request.adjusts for request in requests):
            return policies, None, None
        added, seen = np.zeros((rows, self.vocab), np.float32), np.zeros((rows, self.vocab), bool)
        for row, request in enumerate(requests):
            request.adjust(added[row], seen[row])
        return policies, added, seen

    def run(self, packed: Packed) -> dict[int, int]:
        """Run a step. Return the token sampled for each request, by its id, or BROKEN."""
        put, key = self.decoder.runtime.put, packed.key
        weights = self.decoder.operands(range(self.decoder.config.n_layer))
        rows = [packed.samples] if key.samples else []
        operands = [put([each]) for each in (packed.tokens, packed.segments, *rows)]
        results = self._programs[key](*operands, *self.caches, *weights)
        self.caches = results[bool(rows) :]
        if not packed.requests:
            return {}
        more = [each for each in (packed.added, packed.seen) if each is not None]
        choose = self._programs[ChooseKey(key.samples, bool(more))]
        [tokens] = choose(results[0], *(put([each]) for each in (packed.policies, *more)))
        if any(request.params.logprobs is not None for request in packed.requests):
            self._note_logprobs(packed, results[0], tokens)
        return {request.id: token for request, token in zip(packed.requests, tokens.numpy().tolist(), strict=False)}

    def _note_logprobs(self, packed: Packed, logits: DeviceTensor, tokens: DeviceTensor) -> None:
        results = self._programs[LogprobsKey(packed.key.samples)](logits, tokens)
        own, ids, values = (result.numpy() for result in results)
        for row, request in enumerate(packed.requests):
            if (count := request.params.logprobs) is not None:
                likeliest = dict(zip(ids[row, :count].tolist(), values[row, :count].tolist(), strict=True))
                request.logprobs.append((float(own[row]), likeliest))


_GREEDY = Rules(1, seed=0).packed(1)[0]
