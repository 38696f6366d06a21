"""The choice of tokens: rules of requests as rows, and programs for what rules cannot say.

A step samples by its rules. For requests that change logits before, tokens are chosen once more, by a program of its
own; log-probabilities are a third program. So the others do not pay for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from transformers_neuronx import hlo
from transformers_neuronx.compiler import compile_py_func
from transformers_neuronx.engine.decoder import Decoder
from transformers_neuronx.engine.keys import ProgramKey
from transformers_neuronx.engine.loading import Progress
from transformers_neuronx.engine.rules import GREEDY
from transformers_neuronx.layers.activation import softmax
from transformers_neuronx.layers.rows import declare_rows, field, words
from transformers_neuronx.layers.sampling import NOTHING, sample
from transformers_neuronx.pyhlo import HloModuleProto, HloScribe, Tensor, dtype_named
from transformers_neuronx.runtimes.base import DeviceTensor, Executable
from transformers_neuronx.serving.request import LIKELIEST, Request
from transformers_neuronx.serving.scheduler import Work
from transformers_neuronx.serving.step_writer import SAMPLED, padded

Array = np.ndarray[Any, Any]
WORD = 32  # bits of a word of `Changes.allowed`
Scored = tuple[Request, int]  # a token of a prompt, whose log-probability is kept, by its position


@dataclass(frozen=True)
class ChooseKey(ProgramKey):
    """The choice of a token for each of some rows, of at most so many, from logits that are changed before."""

    kind = "choose"
    rows: int
    most: int


@dataclass(frozen=True)
class LogprobsKey(ProgramKey):
    """Log-probabilities of each row's token, and of its likeliest ones."""

    kind = "logprobs"
    rows: int
    most: int


def sampled_rows(
    requests: Sequence[Request], positions: Sequence[int] | Array, count: int, tokens: Sequence[int] | Array = ()
) -> Array:  # fmt: skip
    """Return `count` rows of `SAMPLED` for what requests sample at these positions, after these tokens of the step, if
    given.

    A request that verifies draft tokens has adjacent rows. Rows without a request are greedy. All generate one token.
    """
    rows = np.zeros(count, SAMPLED)
    rows["token"][: len(tokens)], rows["policy"], rows["eos"] = tokens, GREEDY, -1
    if requests:
        rows["left"][: len(requests)], rows["position"][: len(requests)] = 1, positions
        rows["policy"][: len(requests)] = [request.policy for request in requests]
    return rows


def scored_of(step: Sequence[Work]) -> list[Scored]:
    """Return the tokens of prompts whose log-probabilities are kept after a step."""
    return [(work.request, work.start + 1 + place) for work in step for place in range(work.scored)]


def with_numbers(requests: Sequence[Request]) -> Iterator[tuple[Request, int]]:
    """Yield each request with the number of the same ones before it: of draft tokens that come before its sample."""
    number = 0
    for before, request in zip([None, *requests], requests, strict=False):
        number = number + 1 if request is before else 0
        yield request, number


def seen_by(requests: Sequence[Request], rows: int, vocab: int) -> Array:
    """Return the tokens that each request has, with the draft tokens before its sample. pred[rows, vocab]"""
    seen = np.zeros((rows, vocab), bool)
    for row, (request, guesses) in zip(seen, with_numbers(requests), strict=False):
        request.see(row, guesses)
    return seen


@dataclass(frozen=True)
class Changes:
    """How logits of requests change before a token is chosen. None is for what changes nothing.

    `added` f32[rows, vocab] is added; `seen` pred[rows, vocab] are the tokens that a sequence has, for the repetition
    penalty; `allowed` s32[rows, words] has a bit for each token that may come, the lowest one first.
    """

    added: Array | None
    seen: Array | None
    allowed: Array | None

    @classmethod
    def of(cls, requests: Sequence[Request], rows: int, vocab: int) -> Changes:
        adds, masks = any(each.adds for each in requests), any(each.params.masks for each in requests)
        seen = seen_by(requests, rows, vocab) if any(each.penalizes for each in requests) else None
        added = np.zeros((rows, vocab), np.float32) if adds else None
        allowed = np.full((rows, words_of(vocab)), -1, np.int32) if masks else None
        for row, (request, guesses) in enumerate(with_numbers(requests)):
            if request.reason is None:  # otherwise it ended while the step ran
                try:
                    if added is not None:
                        request.adjust(added[row], guesses)
                    if allowed is not None:
                        request.allow(allowed[row], vocab, guesses)
                except Exception as error:  # the mask is the caller's code; it must not end the requests of others
                    request.error = error
        return cls(added, seen, allowed)

    @classmethod
    def none(cls, rows: int, vocab: int) -> Changes:
        """Return arrays that change nothing."""
        allowed = np.full((rows, words_of(vocab)), -1, np.int32)
        return cls(np.zeros((rows, vocab), np.float32), np.zeros((rows, vocab), bool), allowed)


def words_of(vocab: int) -> int:
    """Return how many words have a bit for each token."""
    return -(-vocab // WORD)


class Chosen:
    """Tokens that were chosen, still on the devices or not: s32[·] in the order of the requests, or s32[·, rounds],
    with NOTHING where there are fewer. Without requests, anything to wait for. Log-probabilities are those of the
    requests' tokens, and then those of tokens that are `scored`. `pooled` are sums for requests, f32[·, h].
    """

    def __init__(
        self, requests: list[Request], tokens: DeviceTensor | Array, logprobs: Sequence[DeviceTensor] = (),
        scored: Sequence[Scored] = (),
    ) -> None:  # fmt: skip
        self.tokens = tokens
        self.pooled: tuple[Sequence[Work], DeviceTensor] | None = None
        self._requests, self._logprobs, self._scored = requests, logprobs, scored

    def read(self) -> dict[int, list[int]]:
        """Wait for the tokens. Return those of each request, by its id, or BROKEN; note their log-probabilities."""
        tokens = self.tokens if isinstance(self.tokens, np.ndarray) else self.tokens.numpy()
        if self._logprobs:
            self._note()
        if self.pooled:
            pools, sums = self.pooled
            for work, total in zip(pools, sums.numpy(), strict=False):
                if work.request.preempted == work.preempted:  # otherwise it starts again
                    work.request.pooled = work.request.pooled + total
        if not self._requests:
            return {}
        rows = (tokens if tokens.ndim > 1 else tokens[:, None]).tolist()
        sampled: dict[int, list[int]] = {}
        for request, row in zip(self._requests, rows, strict=False):
            sampled.setdefault(request.id, []).extend(token for token in row if token != NOTHING)
        return sampled

    def _note(self) -> None:
        """Wait for log-probabilities, and note them."""
        found = zip(*(result.numpy().tolist() for result in self._logprobs), strict=True)
        for request, each in zip(self._requests, found, strict=False):
            request.note(*each)
        for (request, position), each in zip(self._scored, found, strict=False):
            request.note_of_prompt(position, *each)


class Chooser:
    """Chooses tokens from the logits of `sizes` rows, if there are `adjustments` for which steps cannot do it."""

    def __init__(self, decoder: Decoder, sizes: Sequence[int], adjustments: bool) -> None:
        self.decoder, self.most = decoder, max(sizes)
        kinds = (ChooseKey, LogprobsKey) if adjustments else ()
        self.keys = [key(rows, self.most) for rows in sizes for key in kinds]
        self._programs: dict[ProgramKey, Executable] = {}
        self._none: dict[int, list[DeviceTensor]] = {}  # what changes nothing, by the number of rows

    def compile(self, progress: Progress) -> None:
        vocab = self.decoder.config.vocab_size
        self._programs = self.decoder.store.compile_modules(self.keys, lambda key: _module(vocab, key), progress)

    def none(self) -> DeviceTensor:
        """Return what stands for the tokens of no step, s32[most]."""
        return self.decoder.runtime.put([np.zeros(self.most, np.int32)])

    def choose(self, logits: DeviceTensor, rows: Array, changes: Changes) -> DeviceTensor:
        """Choose from logits f32[rows, 1, vocab], by rows of `SAMPLED`. Return tokens s32[most] at once."""
        runtime, count = self.decoder.runtime, len(rows)
        if count not in self._none:
            none = Changes.none(count, self.decoder.config.vocab_size)
            self._none[count] = [runtime.put([array]) for array in _arrays(none)]
        operands = [
            none if array is None else runtime.put([array])
            for array, none in zip(_arrays(changes), self._none[count], strict=True)
        ]
        [tokens] = self._programs[ChooseKey(count, self.most)](logits, runtime.put([words(rows)]), *operands)
        return tokens

    def chosen(
        self, requests: list[Request], tokens: DeviceTensor, logits: DeviceTensor, rounds: DeviceTensor | None = None,
        scored: Sequence[Scored] = (),
    ) -> Chosen:  # fmt: skip
        """Return tokens, or those of several rounds, with the log-probabilities that requests are to have: of their
        tokens, and of those that are `scored`, whose logits are the next ones.
        """
        logprobs: Sequence[DeviceTensor] = ()
        if scored or any(request.params.logprobs is not None for request in requests):
            given = np.full(logits.shape[0], NOTHING, np.int32)
            given[len(requests) :][: len(scored)] = [request.tokens[position] for request, position in scored]
            program = self._programs[LogprobsKey(len(given), self.most)]
            logprobs = program(logits, tokens, self.decoder.runtime.put([given]))
        return Chosen(requests, tokens if rounds is None else rounds, logprobs, scored)


def _arrays(changes: Changes) -> list[Any]:
    return [changes.added, changes.seen, changes.allowed]


def _module(vocab: int, key: ProgramKey) -> HloModuleProto:
    match key:
        case ChooseKey():
            return _choose(vocab, key)
        case LogprobsKey():
            return _logprobs(vocab, key)
    raise TypeError(f"the choice of tokens has no program {key.name}")


def _choose(vocab: int, key: ChooseKey) -> HloModuleProto:
    """Write the choice of tokens.

    Parameters: logits f32[rows, 1, vocab]; a row of `SAMPLED` for each; what is added to logits, f32[rows, vocab]; the
    tokens that a sequence has, pred[rows, vocab], for the repetition penalty; those that may come, s32[rows, words], a
    bit for each. Result: tokens s32[most], NOTHING after those of the rows.
    """
    rows = key.rows

    def program(scribe: HloScribe) -> Tensor:
        parameters = hlo.Parameters()
        logits = hlo.reshape(parameters.add(dtype_named("f32")[rows, 1, vocab], "logits"), rows, vocab)
        packed = declare_rows(parameters, SAMPLED, rows, "rows")
        added = parameters.add(dtype_named("f32")[rows, vocab], "added")
        seen = parameters.add(dtype_named("pred")[rows, vocab], "seen")
        allowed = _bits(parameters.add(dtype_named("s32")[rows, words_of(vocab)], "allowed"), vocab)
        position, policy = field(packed, SAMPLED, "position"), field(packed, SAMPLED, "policy")
        changed = hlo.select(allowed, logits + added, -math.inf)
        return padded(sample(changed, seen, policy, position), key.most)

    return compile_py_func(program)


def _bits(packed: Tensor, count: int) -> Tensor:
    """Return the first bits of each row of words s32[rows, ·], the lowest one of a word first. -> pred[rows, count]"""
    rows, number = packed.sizes
    each = hlo.broadcast_to(hlo.reshape(packed, rows, number, 1), [rows, number, WORD])
    bits = hlo.logical_and(hlo.shift_right(each, hlo.iota("s32", [rows, number, WORD], 2)), 1)
    return hlo.slice(hlo.reshape(hlo.equal(bits, 1), rows, number * WORD), 1, 0, count)


def _logprobs(vocab: int, key: LogprobsKey) -> HloModuleProto:
    """Write log-probabilities of tokens, before any rule of sampling.

    Parameters: logits f32[rows, 1, vocab]; tokens s32[most], of the rows first; tokens in their place, s32[rows], or
    NOTHING. Results: log-probabilities of the tokens, f32[rows]; the LIKELIEST tokens, s32[rows, ·], and theirs,
    f32[rows, ·].
    """
    rows = key.rows

    def program(scribe: HloScribe) -> list[Tensor]:
        parameters = hlo.Parameters()
        logits = hlo.reshape(parameters.add(dtype_named("f32")[rows, 1, vocab], "logits"), rows, vocab)
        tokens = hlo.slice(parameters.add(dtype_named("s32")[key.most], "tokens"), 0, 0, rows)
        given = parameters.add(dtype_named("s32")[rows], "given")
        logs = hlo.log(softmax(logits))
        values, ids = hlo.top_k(logs, min(LIKELIEST, vocab))
        return [hlo.take_rows(logs, hlo.maximum(hlo.select(given >= 0, given, tokens), 0)), ids, values]

    return compile_py_func(program)
