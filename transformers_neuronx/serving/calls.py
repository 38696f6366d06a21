"""Calls of one model as requests of a loop over its own slots, and draft tokens from a model that is called so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from transformers_neuronx.engine.decoder import Decoder
from transformers_neuronx.engine.inputs import Rows
from transformers_neuronx.serving.guesses import Guesser, PromptLookup, TextGuesser
from transformers_neuronx.serving.kv_cache import KVCache
from transformers_neuronx.serving.limits import Limits
from transformers_neuronx.serving.loop import Loop, Steps
from transformers_neuronx.serving.paged_slots import PagedDecoder
from transformers_neuronx.serving.pages import Pages
from transformers_neuronx.serving.request import Request, SamplingParams
from transformers_neuronx.serving.scheduler import Scheduler, Work
from transformers_neuronx.serving.slots import SlotSteps
from transformers_neuronx.serving.step_writer import ROUNDS

Array = np.ndarray[Any, Any]


def call_loop(
    decoder: Decoder, rounds: int, guesser: Guesser | None = None, guesses: int = 0, steps: Steps | None = None
) -> Loop:  # fmt: skip
    """Return a loop over the slots of a model, for a caller who has the model: no other requests come.

    Steps, by default the model's own, generate up to `rounds` tokens of each sequence, or verify up to `guesses` draft
    tokens. Requests bring their tables: see `Decoder.given`.
    """
    longest, rows = decoder.options.buckets.longest, decoder.slots
    if isinstance(decoder, PagedDecoder):
        steps = steps or decoder.steps
        cache, tokens, rounds = decoder.cache, decoder.steps.most_tokens, min(rounds, ROUNDS)
        joined = decoder.verifying(guesses)[-1].tokens if guesses else tokens  # all of which may sample
    else:
        steps, cache, tokens = SlotSteps(decoder, guesses), KVCache([Pages(rows, longest)]), rows * longest
        rounds, joined = min(rounds, max(decoder.options.chunk, 1)), tokens
    limits = Limits(tokens, joined, rows, longest, guesses=guesses, rounds=rounds)
    return Loop(steps, Scheduler(cache, limits), guesser)


def guesser_of(draft: Any) -> Guesser:
    """Return what makes draft tokens: from text, or by calls of a model."""
    return TextGuesser(draft) if isinstance(draft, PromptLookup) else CallGuesser(draft.decoder)


class CallGuesser(Guesser):
    """Draft tokens from a smaller model, in its own slots, with the rules and random numbers of each request.

    A request has the slot of its number, if that is free.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self._fed: dict[int, tuple[int, int]] = {}  # for each slot, whose tokens it holds, and how many

    def guess(self, works: Sequence[Work]) -> Sequence[list[int] | None]:
        drafting = {self._slot(work.request, works): work for work in works if work.guesses}
        if not drafting:
            return [[] for _ in works]
        with self.decoder.guarded():
            return self._guessed(works, drafting)

    def _guessed(self, works: Sequence[Work], drafting: dict[int, Work]) -> list[list[int]]:
        self._catch_up(drafting)
        most = max(work.guesses for work in drafting.values())
        loop = call_loop(self.decoder, most if self.decoder.loops else 1)
        requests = {work.request.id: self._request(slot, work) for slot, work in drafting.items()}
        for request in requests.values():
            loop.scheduler.add(request)
        while any(request.reason is None for request in requests.values()):
            loop.advance()
        made = {number: request.tokens[request.prompt_length + 1 :] for number, request in requests.items()}
        return [made.get(work.request.id, []) for work in works]

    def _request(self, slot: int, work: Work) -> Request:
        """Return a request for the draft tokens after the last token of another one."""
        tokens, start = work.request.tokens, work.start
        params = SamplingParams(max_tokens=1 + work.guesses, repetition_penalty=work.request.params.repetition_penalty)
        given = self.decoder.given(slot, start, start + work.guesses)
        request = Request(slot, tokens[:start], params, rules=work.request.policy, given=given, computed=start)
        request.append(tokens[start])
        self._fed[slot] = work.request.id, start + work.guesses
        return request

    def _slot(self, request: Request, works: Sequence[Work]) -> int:
        """Return the slot of a request: the one it has, or one that no request of these works has."""
        owners = {owner: slot for slot, (owner, _) in self._fed.items()}
        if request.id in owners:
            return owners[request.id]
        busy = {owners.get(work.request.id) for work in works}
        free = [slot for slot in range(self.decoder.slots) if slot not in busy]
        slot: int = min(free, key=lambda slot: (slot != request.id, slot in self._fed))
        self._fed[slot] = request.id, request.unknown
        return slot

    def _catch_up(self, drafting: dict[int, Work]) -> None:
        """Feed the tokens before the last one of each request that were not fed yet."""
        fed = {slot: self._fed[slot][1] for slot in drafting}
        behind = [slot for slot, work in drafting.items() if fed[slot] < work.start]
        if behind:
            tokens = [np.array(drafting[slot].request.tokens[fed[slot] : drafting[slot].start]) for slot in behind]
            start = np.array([fed[slot] for slot in behind])
            self.decoder.feed(Rows(tokens, start, np.ones((len(behind), 1), bool), np.array(behind)))

    def forget(self, numbers: Sequence[int]) -> None:
        """Forget what was fed of these requests."""
        self._fed = {slot: (owner, end) for slot, (owner, end) in self._fed.items() if owner not in numbers}

    def reset(self) -> None:
        self._fed.clear()
