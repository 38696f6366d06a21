"""Speculation as the original's callers compose it: draft providers, acceptors, and single rounds for a server.

`speculation.drafts` needs none of this: there a draft token is accepted if the target samples it too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from transformers_neuronx.engine.inputs import Integers, Rows
from transformers_neuronx.engine.rules import penalty_of
from transformers_neuronx.models.generation import Generation
from transformers_neuronx.serving.calls import CallGuesser, call_loop
from transformers_neuronx.serving.request import Request, SamplingParams
from transformers_neuronx.support.turns import take_all

Array = np.ndarray[Any, Any]


class DraftProvider:
    """Base of what makes draft tokens for `SpeculativeGenerator`."""

    def __call__(
        self,
        input_ids: torch.Tensor,
        k: int,
        cache_ids: torch.Tensor | None = None,
        start_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `k` draft tokens after the last of `input_ids`, s64[batch, k], and their scores, f32[k, batch, vocab].

        With `cache_ids` None or beginning at 0, `input_ids` [batch, n] are prompts; one token and its scores
        f32[batch, vocab] are enough. Otherwise it is one token per row, [batch, 1], at the position in `cache_ids`.
        """
        raise NotImplementedError(f"{type(self).__name__} needs __call__, which makes draft tokens")


class DraftModelForSpeculation(DraftProvider):
    """Makes draft tokens with a model, greedily."""

    def __init__(self, model: Any, **kwargs: Any) -> None:
        self.model = model
        self.kwargs = kwargs

    def __call__(
        self,
        input_ids: torch.Tensor,
        k: int,
        cache_ids: torch.Tensor | None = None,
        start_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores = [self.model(input_ids, cache_ids=cache_ids, start_ids=start_ids)]
        tokens = [scores[0].argmax(1, keepdim=True)]
        if cache_ids is None or not cache_ids.flatten()[0]:
            return tokens[0], scores[0]
        while len(tokens) < k:
            cache_ids = cache_ids + 1
            scores.append(self.model(tokens[-1], cache_ids=cache_ids, start_ids=start_ids))
            tokens.append(scores[-1].argmax(1, keepdim=True))
        return torch.cat(tokens, 1), torch.stack(scores)


class TokenAcceptor:
    """Base of what decides how many draft tokens a target accepts."""

    def __call__(
        self, draft_ids: torch.Tensor, draft_scores: torch.Tensor, target_scores: torch.Tensor
    ) -> torch.Tensor:
        """Return the accepted draft tokens and one token more, s64[batch, at most n + 1], with zeros after them.

        - `draft_ids`: s64[batch, n].
        - `draft_scores`, `target_scores`: logits f32[batch, n, vocab] and f32[batch, n + 1, vocab].
        """
        raise NotImplementedError(f"{type(self).__name__} needs __call__, which returns accepted tokens")


class DefaultTokenAcceptor(TokenAcceptor):
    """Accepts a draft token with the probability of target over draft, as in https://arxiv.org/abs/2302.01318.

    After the first token that is not accepted, the next one is sampled from what the target's probabilities exceed the
    draft's by. Tokens are then distributed as if the target had sampled them all, with torch's random numbers.
    """

    def __call__(
        self, draft_ids: torch.Tensor, draft_scores: torch.Tensor, target_scores: torch.Tensor
    ) -> torch.Tensor:
        draft, target = draft_scores.softmax(-1), target_scores.softmax(-1)
        count = draft_ids.shape[1]
        chance = (target[:, :count] / draft).gather(2, draft_ids[..., None])[..., 0]
        right = (torch.rand(chance.shape) < chance).long().cumprod(1).sum(1)
        accepted = torch.zeros(len(draft_ids), count + 1, dtype=torch.int64)
        for row, kept in enumerate(right.tolist()):
            left = target[row, kept]
            if kept < count:
                exceeds = (left - draft[row, kept]).clamp(min=0)
                left = exceeds if exceeds.any() else left  # they are the same but for rounding
            accepted[row, :kept] = draft_ids[row, :kept]
            accepted[row, kept] = torch.multinomial(left, 1)[0]
        return accepted


class ReferenceTokenAcceptor(DefaultTokenAcceptor):
    """The same, under the name of the original's slower version. Also takes scores without the batch's dimension."""

    def __call__(
        self, draft_ids: torch.Tensor, draft_scores: torch.Tensor, target_scores: torch.Tensor
    ) -> torch.Tensor:
        if draft_scores.dim() == 2:
            draft_scores, target_scores = draft_scores[None], target_scores[None]
        accepted = super().__call__(draft_ids, draft_scores, target_scores)
        return accepted[:, : int(_lengths(accepted, draft_ids).max())]


def _lengths(accepted: torch.Tensor, draft_ids: torch.Tensor) -> torch.Tensor:
    """Return how many of the accepted tokens [batch, m] count: up to the last that is not 0, or a token after the right
    ones of the draft, which may be 0.
    """
    width = accepted.shape[1]
    last = ((accepted != 0) * torch.arange(1, width + 1)).amax(1)
    common = min(width, draft_ids.shape[1])
    right = (accepted[:, :common] == draft_ids[:, :common]).long().cumprod(1).sum(1)
    return torch.maximum(last, (right + 1).clamp(max=width))


class Accepting:
    """A speculator with a draft provider and an acceptor. `k` tokens go through the target at a time."""

    models: Sequence[Any] = ()

    def __init__(self, draft: DraftProvider, acceptor: TokenAcceptor, k: int) -> None:
        self.draft, self.acceptor, self.k = draft, acceptor, k

    def blocks(self, generation: Generation, count: int) -> Iterator[Array]:
        """Yield blocks of tokens as `Generation.on_devices` does."""
        generation.wanted[:] = count
        prompts, rows = generation.prompts, len(generation.prompts.tokens)
        width = max(map(len, prompts.tokens))
        ids = torch.tensor([row.tolist() + [0] * (width - len(row)) for row in prompts.tokens])
        columns = torch.tensor([[i if i < len(row) else 0 for i in range(width)] for row in prompts.tokens])
        slots = torch.arange(rows) if rows > 1 else None
        self.draft(ids, self.k, columns if rows > 1 else None, slots)
        yield generation.first()
        while generation.wanted.any():
            yield self._round(generation, slots)

    def _round(self, generation: Generation, slots: torch.Tensor | None) -> Array:
        rows = generation.count
        ids = torch.from_numpy(generation.rows["token"][:rows, None].astype(np.int64))
        places = torch.from_numpy(generation.rows["position"][:rows].astype(np.int64))
        at = places[:, None] if rows > 1 else places
        drafts, scores = self.draft(ids, self.k - 1, at, slots)
        fed = torch.cat([ids, drafts], 1).numpy()
        active = np.flatnonzero(generation.wanted)
        room = generation.decoder.options.buckets.longest - int(places[active].max())
        count = min(fed.shape[1], room)
        tokens = Rows(list(fed[active, :count]), places.numpy()[active], np.ones((len(active), 1), bool), active)
        logits = torch.from_numpy(generation.decoder.feed(tokens, all_positions=True))
        drafts, scores = drafts[active, : count - 1], scores[: count - 1].transpose(0, 1)[active]
        accepted = self.acceptor(drafts, scores, logits)
        kept = int(_lengths(accepted, drafts).min())
        if kept == self.k:  # the last draft token was accepted, and not fed to the draft
            self.draft(torch.from_numpy(fed[:, -1:]), 1, at + self.k - 1, slots)
        block = np.zeros((rows, kept), np.int64)
        block[active] = accepted[:, :kept].numpy()
        return generation.take(block[:, : generation.wanted.max()])


class Rounds:
    """Single rounds of speculation, for callers that batch requests themselves: see `FusedSpeculativeDecoder`."""

    def __init__(self, draft: Any, target: Any, k: int, pad: int) -> None:
        self.draft, self.target, self.k, self.pad = draft, target, k, pad
        self._text = np.zeros((target.options.batch_size, target.options.buckets.longest + k + 1), np.int64)
        self._guesser = CallGuesser(draft.decoder)

    def run(
        self, input_ids: Integers, cache_ids: Integers | None, start_ids: Integers | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Feed prompts, or do a round for the last token of each row, as `speculative_iteration` describes."""
        rows = self.target._read(input_ids, cache_ids=cache_ids, start_ids=start_ids)
        for row, slot, start, end in zip(rows.tokens, rows.slots, rows.start, rows.end, strict=True):
            self._text[slot, start:end] = row
        with take_all([self.draft.turns, self.target.turns], "speculative_iteration()"):
            if rows.start.min() > 0:
                return self._round(rows)
            self._guesser.forget(rows.slots.tolist())
            where = dict(cache_ids=cache_ids, start_ids=start_ids)
            found = self.target.run(input_ids, **where)
            tokens = found if found.dtype == torch.int64 else found.argmax(1, keepdim=True)
            return tokens, torch.ones(len(tokens), 1, dtype=torch.int64)

    def _round(self, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        policy = self.target._rules().packed(self.target.options.batch_size)
        requests = [self._request(*row, policy) for row in zip(rows.slots.tolist(), rows.end.tolist(), strict=True)]
        loop = call_loop(self.target.decoder, 1, self._guesser, self.k)
        for request in requests:
            loop.scheduler.add(request)
        with self.target.decoder.guarded():
            loop.advance()
        for request in requests:
            loop.scheduler.abort(request, "stop")  # gives back its hold on the slot's pages
        made = np.full((len(requests), self.k + 1), self.pad, np.int64)
        counts = np.zeros((len(requests), 1), np.int64)
        for row, count, end, request in zip(made, counts, rows.end.tolist(), requests, strict=True):
            tokens = request.tokens[end:]
            row[: len(tokens)], count[0] = tokens, len(tokens)
            self._text[request.id, end : end + len(tokens)] = tokens
        return torch.from_numpy(made), torch.from_numpy(counts)

    def _request(self, slot: int, end: int, policy: Array) -> Request:
        """Return a request for one round: the last of the slot's `end` tokens is fed next."""
        count = min(self.k + 1, self.target.options.buckets.longest - end + 1)
        tokens, rules = self._text[slot, :end].tolist(), policy[slot]
        params = SamplingParams(max_tokens=1 + count, repetition_penalty=penalty_of(rules))
        given = self.target.decoder.given(slot, end - 1, end - 1 + count)
        how: dict[str, Any] = dict(rules=rules, given=given, computed=end - 1)
        request = Request(slot, tokens[:-1], params, **how, pictured=self.target.decoder.pictured(slot, end - 1, None))
        request.append(tokens[-1])
        return request
