"""The choice of tokens from logits on the devices, as a program of its own.

Requests that need more than rules of sampling have a variant of it, and log-probabilities are a third program, so that
the others do not pay for them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from transformers_neuronx import hlo
from transformers_neuronx.compiler import compile_py_func
from transformers_neuronx.decoder import Decoder
from transformers_neuronx.keys import ProgramKey
from transformers_neuronx.layers.activation import softmax
from transformers_neuronx.layers.sampling import NOTHING, POLICY_COLUMNS, sample, unpacked
from transformers_neuronx.pyhlo import HloModuleProto, HloScribe, Tensor, dtype_named
from transformers_neuronx.rules import Rules
from transformers_neuronx.runtimes.base import DeviceTensor, Executable
from transformers_neuronx.serving.request import LIKELIEST, Request

Array = np.ndarray[Any, Any]
K = TypeVar("K", bound=ProgramKey)


@dataclass(frozen=True)
class ChooseKey(ProgramKey):
    """The choice of a token for each of some rows, of at most so many; `adjusted` if logits are changed before."""

    kind = "choose"
    rows: int
    most: int
    adjusted: bool


@dataclass(frozen=True)
class LogprobsKey(ProgramKey):
    """Log-probabilities of each row's token, and of its likeliest ones."""

    kind = "logprobs"
    rows: int
    most: int


@dataclass(frozen=True)
class Choices:
    """What the choice of a token for each request needs, for programs of `rows` rows; the others choose nothing.

    `policies` s32[rows, 1 + POLICY_COLUMNS] are positions and policies. If logits change before, `added` f32[rows,
    vocab] and `seen` pred[rows, vocab] say how.
    """

    requests: list[Request]
    policies: Array
    added: Array | None
    seen: Array | None

    @classmethod
    def of(cls, requests: list[Request], rows: int, vocab: int) -> Choices:
        policies = np.zeros((rows, 1 + POLICY_COLUMNS), np.int32)
        policies[:, 1:] = _GREEDY
        for row, request in enumerate(requests):
            if request.reason is None:  # otherwise it ended while the step ran
                policies[row] = len(request.tokens), *request.policy
        if not any(request.adjusts for request in requests):
            return cls(requests, policies, None, None)
        added, seen = np.zeros((rows, vocab), np.float32), np.zeros((rows, vocab), bool)
        for row, request in enumerate(requests):
            request.adjust(added[row], seen[row])
        return cls(requests, policies, added, seen)

    @property
    def plain(self) -> bool:
        """Whether rules of sampling are all that is needed."""
        return self.added is None and not self.logprobs

    @property
    def logprobs(self) -> bool:
        return any(request.params.logprobs is not None for request in self.requests)


class Chosen:
    """Tokens that were chosen, still on the devices: `tokens` s32[·], in the order of the requests."""

    def __init__(self, requests: list[Request], tokens: DeviceTensor, logprobs: list[DeviceTensor]) -> None:
        self.tokens = tokens
        self._requests, self._logprobs = requests, logprobs

    def read(self) -> dict[int, int]:
        """Wait for the tokens. Return that of each request, by its id, or BROKEN; note their log-probabilities."""
        tokens = self.tokens.numpy().tolist()
        if self._logprobs:
            own, ids, values = (result.numpy() for result in self._logprobs)
            for row, request in enumerate(self._requests):
                request.note(float(own[row]), ids[row].tolist(), values[row].tolist())
        return {request.id: token for request, token in zip(self._requests, tokens, strict=False)}


class Chooser:
    """Chooses tokens from the logits of `sizes` rows."""

    def __init__(self, decoder: Decoder, sizes: Sequence[int]) -> None:
        self.decoder, self.most = decoder, max(sizes)
        self.keys: list[ProgramKey] = [
            ChooseKey(rows, self.most, adjusted) for rows in sizes for adjusted in (False, True)
        ]
        self.keys += [LogprobsKey(rows, self.most) for rows in sizes]
        self._programs: dict[ProgramKey, Executable] = {}

    def compile(self) -> None:
        self._programs = compiled(self.decoder, self.keys, lambda key: _module(self.decoder.config.vocab_size, key))

    def none(self) -> DeviceTensor:
        """Return what stands for the tokens of no step, s32[most]."""
        return self.decoder.runtime.put([np.zeros(self.most, np.int32)])

    def choose(self, logits: DeviceTensor, choices: Choices) -> Chosen:
        """Choose from logits f32[rows, 1, vocab]. Returns before the tokens are there."""
        put, rows = self.decoder.runtime.put, len(choices.policies)
        changes = [put([each]) for each in (choices.added, choices.seen) if each is not None]
        [tokens] = self._programs[ChooseKey(rows, self.most, bool(changes))](logits, put([choices.policies]), *changes)
        logprobs = self._programs[LogprobsKey(rows, self.most)](logits, tokens) if choices.logprobs else []
        return Chosen(choices.requests, tokens, logprobs)


def compiled(decoder: Decoder, keys: Sequence[K], write: Callable[[K], HloModuleProto]) -> dict[K, Executable]:
    """Compile programs that are not the model's own, several at once."""

    def build(key: K) -> Executable:
        module = write(key)
        module.name = key.name
        return decoder.build(module)

    with ThreadPoolExecutor(decoder.options.workers or os.cpu_count()) as pool:
        return dict(zip(keys, pool.map(build, keys), strict=True))


_GREEDY = Rules(1, seed=0).packed(1)[0]


def _module(vocab: int, key: ProgramKey) -> HloModuleProto:
    match key:
        case ChooseKey():
            return _choose(vocab, key)
        case LogprobsKey():
            return _logprobs(vocab, key)
    raise TypeError(f"the choice of tokens has no program {key.name}")


def _choose(vocab: int, key: ChooseKey) -> HloModuleProto:
    """Write the choice of tokens.

    Parameters: logits f32[rows, 1, vocab]; s32[rows, 1 + POLICY_COLUMNS], the position and policy of each row; if
    adjusted, what is added to logits, f32[rows, vocab], and the tokens that a sequence has, pred[rows, vocab], for the
    repetition penalty. Result: tokens s32[most], NOTHING after those of the rows.
    """
    rows = key.rows

    def program(scribe: HloScribe) -> Tensor:
        parameters = hlo.Parameters()
        logits = hlo.reshape(parameters.add(dtype_named("f32")[rows, 1, vocab], "logits"), rows, vocab)
        packed = parameters.add(dtype_named("s32")[rows, 1 + POLICY_COLUMNS], "rows")
        seen = hlo.full(0, "pred", [rows, vocab])
        if key.adjusted:
            added = parameters.add(dtype_named("f32")[rows, vocab], "added")
            seen = parameters.add(dtype_named("pred")[rows, vocab], "seen")
            logits = logits + added
        position = hlo.reshape(hlo.slice(packed, 1, 0, 1), rows)
        tokens = sample(logits, seen, unpacked(hlo.slice(packed, 1, 1, 1 + POLICY_COLUMNS)), position)
        rest = [hlo.full(NOTHING, "s32", [key.most - rows])] if key.most > rows else []
        return hlo.concatenate([tokens, *rest], 0)

    return compile_py_func(program)


def _logprobs(vocab: int, key: LogprobsKey) -> HloModuleProto:
    """Write log-probabilities of tokens, before any rule of sampling.

    Parameters: logits f32[rows, 1, vocab]; tokens s32[most], of the rows first. Results: those of the tokens,
    f32[rows]; the LIKELIEST tokens, s32[rows, ·], and theirs, f32[rows, ·].
    """
    rows = key.rows

    def program(scribe: HloScribe) -> list[Tensor]:
        parameters = hlo.Parameters()
        logits = hlo.reshape(parameters.add(dtype_named("f32")[rows, 1, vocab], "logits"), rows, vocab)
        tokens = hlo.slice(parameters.add(dtype_named("s32")[key.most], "tokens"), 0, 0, rows)
        logs = hlo.log(softmax(logits))
        values, ids = hlo.top_k(logs, min(LIKELIEST, vocab))
        return [hlo.take_rows(logs, hlo.maximum(tokens, 0)), ids, values]

    return compile_py_func(program)
