"""Draft tokens from a head: a layer that reads the target's hidden states in place of computing its own.

What a head knows of a token is made of the features of the one before, so it computes the tokens of a step when the
step is read, and those after them are known. Then it drafts from its own last hidden states.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple, Protocol, cast

import numpy as np

from transformers_neuronx import hlo
from transformers_neuronx.compiler import compile_py_func
from transformers_neuronx.engine.decoder import Decoder
from transformers_neuronx.engine.family import DecoderConfig, Graph
from transformers_neuronx.engine.keys import ProgramKey, Segment
from transformers_neuronx.engine.kv_cache import flattened, in_place
from transformers_neuronx.engine.loading import Progress
from transformers_neuronx.engine.programs import Programs
from transformers_neuronx.layers.rows import field, joined
from transformers_neuronx.layers.sampling import NOTHING
from transformers_neuronx.pyhlo import HloModuleProto, HloScribe, Tensor, dtype_named
from transformers_neuronx.pyhlo.dtypes import element_type
from transformers_neuronx.runtimes.base import DeviceTensor
from transformers_neuronx.serving.choices import sampled_rows, seen_by
from transformers_neuronx.serving.guesses import Guesser
from transformers_neuronx.serving.kv_cache import Copy, KVCache
from transformers_neuronx.serving.limits import Limits
from transformers_neuronx.serving.paged import Started, steps_over
from transformers_neuronx.serving.request import Request
from transformers_neuronx.serving.scheduler import Work
from transformers_neuronx.serving.step_times import shortest
from transformers_neuronx.serving.step_writer import SAMPLED, TOKEN, StepWriter, of_one_token
from transformers_neuronx.serving.steps import FEW, CopyKey, TokensKey

Array = np.ndarray[Any, Any]


class HeadConfig(DecoderConfig, Protocol):
    """What is also read of a head's configuration: the number of features of a token, of all depths together."""

    @property
    def features(self) -> int: ...


class HeadGraph(Graph, Protocol):
    """A module with the forward pass of a head."""

    def combined(self, config: Any, w: Any, hidden: Tensor, /) -> Tensor:
        """Return features [b, n, h] of the target's hidden states, side by side [b, n, ·]."""
        ...


class DraftHead(ABC):
    """A head that drafts for a model from the model's hidden states."""

    @abstractmethod
    def depths_in(self, model: Any) -> tuple[int, ...]:
        """Return the layers of a model before which it reads hidden states, or LAST. ConfigError if it does not fit."""

    @abstractmethod
    def decoder_for(self, model: Any) -> Decoder:
        """Return the head with its weights on the devices of a model, a `HeadConfig` and a `HeadGraph`. ConfigError if
        it does not fit.
        """


@dataclass(frozen=True)
class HeadKey(ProgramKey):
    """Drafts of a head: tokens whose features are there, sequences that they may be of, sequences that draft tokens are
    for, maybe none, how many, pages of a sequence, and hidden states of a token that features are made of.
    """

    kind = "draft"
    tokens: int
    sequences: int
    samples: int
    guesses: int
    pages: int
    features: int

    def written(self, programs: Programs, segment: Segment) -> HloModuleProto:
        return head_module(programs, self)


def head_module(programs: Programs, key: HeadKey) -> HloModuleProto:
    """Write the program that computes tokens from features, and drafts.

    Parameters: a row of `TOKEN` for each token, where `chosen` is the row of its features, a `sequence_row` for each
    sequence, those that draft tokens are for first, and a row of `SAMPLED` for each of these, joined; if there are any,
    the tokens that each one's sequence has, pred[samples, vocab]; the caches; the weights; what features are made of,
    [tokens, 1, features]. Results: if there are any, draft tokens, s32[samples, guesses], NOTHING after as many as a
    row has `left`, and the tokens that sequences have, in place; the caches, in place.
    """

    def program(scribe: HloScribe) -> list[Tensor]:
        writer = StepWriter(scribe, programs, key, (SAMPLED, key.samples))
        hidden = writer.parameters.add(dtype_named(programs.dtype)[key.tokens, 1, key.features], "features")
        ids, position, end, row = (field(writer.tokens, TOKEN, name) for name in ("id", "position", "end", "chosen"))
        rows, left = (field(writer.wanted, SAMPLED, name) for name in ("token", "left"))
        made = cast(HeadGraph, programs.graph).combined(programs.config, writer.shared, hlo.take(hidden, row))
        x, caches = writer.computed(ids, position, end, writer.sequences, writer.caches, rows, made)
        if not key.samples:
            return in_place(flattened(caches), flattened(writer.caches))
        found, _, seen = writer.sampled(x, hlo.take(ids, rows), writer.seen)
        drafts, at, count = [found], hlo.take(position, rows), key.samples
        own, places = hlo.slice(writer.sequences, 0, 0, count), hlo.iota("s32", [count])
        for number in range(1, key.guesses):
            ids, where = hlo.maximum(found, 0), at + number
            sequences = of_one_token(own, places, left > number, where, hlo.full(0, "s32", [count]))
            x, caches = writer.computed(ids, where, where + 1, sequences, caches, features=x)
            found, _, seen = writer.sampled(x, ids, seen, later=number)
            drafts.append(found)
        tokens = hlo.concatenate([hlo.reshape(each, -1, 1) for each in drafts], 1)
        wanted = hlo.iota("s32", tokens.sizes, 1) < hlo.reshape(left, -1, 1)
        tokens = hlo.select(wanted, tokens, NOTHING)
        return [tokens, *in_place([seen], [writer.seen]), *in_place(flattened(caches), flattened(writer.caches))]

    return compile_py_func(program)


class Chunk(NamedTuple):
    """Tokens of a request in a step of the target: a number from position `start` on. `row` is that of the first."""

    request: Request
    start: int
    number: int
    row: int


class Before(NamedTuple):
    """A step of the target, the number of tokens that its program computes, and the features of these."""

    step: Sequence[Work]
    size: int
    features: DeviceTensor


class HeadGuesser(Guesser):
    """Draft tokens from a head, with the rules and random numbers of each request. Its cache has the target's pages."""

    def __init__(
        self, decoder: Decoder, cache: KVCache, limits: Limits, keys: Sequence[TokensKey] | None = None
    ) -> None:  # fmt: skip
        """`keys` are those of the target's steps, by default an engine's."""
        self._steps = steps = steps_over(decoder, cache, limits, adjustments=False)
        self._decoder = decoder
        features, pages = cast(HeadConfig, decoder.config).features, steps.keys[0].pages
        self._keys = [
            HeadKey(size, sequences, samples, limits.guesses, pages, features)
            for size, sequences in {key.tokens: key.sequences for key in keys or steps.keys}.items()
            for samples in sorted({0, min(FEW, sequences), sequences})
        ]
        self._seen: dict[int, Any] = {}  # what no sequence has, by the number of samples
        self._before: Before | None = None  # the target's last step

    @property
    def programs(self) -> int:
        return len(self._keys) + 1

    def compile(self, progress: Progress) -> None:
        self._steps.store.compile([*self._keys, CopyKey()], progress)

    def guess(self, works: Sequence[Work]) -> Sequence[list[int] | None]:
        drafting = {work.request.id: work.guesses for work in works if work.guesses}
        found = self._caught_up(drafting)
        return [list(takewhile(lambda token: token >= 0, found.get(work.request.id, []))) for work in works]

    def _caught_up(self, drafting: dict[int, int]) -> dict[int, list[int]]:
        """Compute the tokens of the target's last step. Return draft tokens of requests, by id, up to so many each."""
        before, self._before = self._before, None
        if before is None:
            return {}
        parts = sorted(_known(before.step), key=lambda part: part.request.id not in drafting)
        if not parts:
            return {}
        few = sum(part.request.id in drafting for part in parts)
        key = next(key for key in self._keys if key.tokens == before.size and key.samples >= few)
        drafts = self._run(key, parts, drafting, before.features)
        ids = [part.request.id for part in parts[:few]]
        return dict(zip(ids, drafts.numpy().tolist(), strict=False)) if drafts else {}

    def _run(self, key: HeadKey, parts: Sequence[Chunk], drafting: dict[int, int], features: DeviceTensor) -> Any:
        """Start a program. Return the draft tokens of the first parts, if any are wanted."""
        steps, runtime = self._steps, self._decoder.runtime
        sampling = [part.request for part in parts if part.request.id in drafting]
        if key.samples and (any(each.penalizes for each in sampling) or key.samples not in self._seen):
            self._seen[key.samples] = runtime.put([seen_by(sampling, key.samples, self._decoder.config.vocab_size)])
        seen = [self._seen[key.samples]] if key.samples else []
        weights = self._decoder.operands(range(self._decoder.config.n_layer))
        [(_, program)] = steps.store.parts(key)
        rows = runtime.put([joined(*self._rows(key, parts, sampling, drafting))])
        made = program(rows, *seen, *steps.caches, *weights, features)
        if not key.samples:
            steps.caches[:] = made
            return None
        drafts, self._seen[key.samples], *steps.caches[:] = made
        return drafts

    def _rows(
        self, key: HeadKey, parts: Sequence[Chunk], sampling: Sequence[Request], drafting: dict[int, int]
    ) -> tuple[Array, Array, Array]:
        """Return the rows of a program: tokens, sequences, and samples."""
        number = np.array([part.number for part in parts])
        first, count = np.cumsum(number) - number, len(parts)
        tokens, segments = np.zeros(key.tokens, TOKEN), self._steps.segments(key)
        tokens["end"], tokens["adapter"] = 1, -1
        for part, at in zip(parts, first.tolist(), strict=True):
            own, places = tokens[at : at + part.number], np.arange(part.number)
            own["id"] = part.request.tokens[part.start + 1 : part.start + 1 + part.number]
            own["position"], own["chosen"] = part.start + places, part.row + places
            own["end"] = np.maximum(part.request.prompt_length, own["position"] + 1)
        segments["first"][:count], segments["count"][:count] = first, number
        segments["start"][:count] = [part.start for part in parts]
        segments["of_prompt"][:count] = [part.start < part.request.prompt_length for part in parts]
        self._steps.place(segments, [part.request for part in parts], [False] * count)
        positions, last = [len(request.tokens) for request in sampling], first + number - 1
        samples = sampled_rows(sampling, positions, key.samples, last[: len(sampling)])
        samples["left"][: len(sampling)] = [drafting[request.id] for request in sampling]
        return tokens, segments, samples

    def seconds(self) -> float:
        key = next(key for key in self._keys if key.samples)
        dtype = element_type(self._decoder.options.amp).numpy
        features = self._decoder.runtime.put([np.zeros((key.tokens, 1, key.features), dtype)])
        return shortest(lambda: self._run(key, [], {}, features).numpy())

    def copy(self, copies: Sequence[Copy]) -> None:
        if copies:  # of pages that it may still have to write
            self._caught_up({})
        self._steps.copy(copies)

    def follow(self, step: Sequence[Work], started: Started) -> None:
        assert started.features is not None
        self._before = Before(step, started.packed.key.tokens, started.features)

    def reset(self) -> None:
        self._before = None
        self._seen.clear()
        self._steps.reset()


def _known(step: Sequence[Work]) -> Iterator[Chunk]:
    """Yield the tokens of a step whose next ones are known, of requests that still run, and have their pages."""
    row = 0
    for work in step:
        request = work.request
        if request.reason is None and work.preempted == request.preempted:
            number = min(work.start + work.count, len(request.tokens) - 1) - work.start
            if number > 0:
                yield Chunk(request, work.start, number, row)
        row += work.count
