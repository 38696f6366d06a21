"""Generates tokens: in chunks by a loop on the devices, or one by one if the host must see the logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from transformers_neuronx.engine.decoder import Decoder
from transformers_neuronx.engine.inputs import Rows
from transformers_neuronx.engine.loops import EOS_COLUMNS, LOOP
from transformers_neuronx.engine.rules import Rules
from transformers_neuronx.errors import EngineError, InputError
from transformers_neuronx.layers.sampling import BROKEN, NOTHING
from transformers_neuronx.serving.calls import call_loop, guesser_of
from transformers_neuronx.serving.head_calls import HeadCalls
from transformers_neuronx.serving.loop import Loop
from transformers_neuronx.serving.request import Request, SamplingParams

Array = np.ndarray[Any, Any]
Criteria = Callable[[torch.Tensor, Any], Any]  # ids so far, scores -> whether to stop, for all rows or per row
Feed = Callable[[Rows], Array]  # -> logits f32[b, 1, vocab], as `Decoder.feed` returns them
Process = Callable[[Array], Array]  # logits f32[b, vocab] -> logits


class Generation:
    """Sequences in the slots 0, 1, …, generated from prompts that serve `repeats` sequences each.

    `eos` are the tokens that end a row. `feed` is called where the host must see the logits.
    """

    def __init__(
        self, decoder: Decoder, prompts: Rows, repeats: int, rules: Rules, eos: Sequence[int], feed: Feed
    ) -> None:
        if len(eos) > EOS_COLUMNS:
            raise InputError(f"eos_token_id must be at most {EOS_COLUMNS} tokens, got {len(eos)}")
        self.decoder, self._feed = decoder, feed
        self.prompts, self.repeats = prompts, repeats
        self.history = [ids.tolist() for ids in prompts.tokens * repeats]
        self.count = len(self.history)
        self.eos = list(eos)
        self.rows = np.zeros(decoder.slots, LOOP)
        self.rows["position"][: self.count] = np.tile(prompts.end, repeats)
        self.rows["policy"] = Rules(1, seed=0).packed(decoder.slots)
        self.rows["policy"][: self.count] = rules.packed(self.count)
        self.rows["eos"] = [*eos, *[-1] * (EOS_COLUMNS - len(eos))]
        self.rules = rules
        self._noted = not rules.penalizes  # whether `seen` on the devices is up to date
        self._loop: Loop | None = None
        self._requests: list[Request] = []

    @property
    def wanted(self) -> Array:
        """Number of tokens left to generate in each row; setting zero ends it."""
        left: Array = self.rows["left"][: self.count]
        return left

    @property
    def seen(self) -> Array:
        """The tokens that each slot's sequence has, pred[slots, vocab]."""
        seen = np.zeros((self.decoder.slots, self.decoder.config.vocab_size), bool)
        for row, ids in enumerate(self.history):
            seen[row, ids] = True
        return seen

    def _note(self) -> None:
        """Tell the devices the tokens that each sequence has, if a rule depends on them."""
        if not self._noted:
            self.decoder.note(self.seen)
            self._noted = True

    def first(self, process: Process | None = None) -> Array:
        """Feed the prompts, and sample the token after each. -> s64[batch, 1]"""
        if process is not None:
            logits = np.tile(self._feed(self.prompts)[:, 0], (self.repeats, 1))
            self.decoder.repeat(len(self.prompts.tokens), self.repeats)
            return self.sample(process(logits))
        self._note()
        tokens = self.decoder.sample_after(self.prompts, self.rows["policy"][: self.count], self.repeats)
        return self.take(tokens[:, None], fed=0)

    def sample(self, logits: Array) -> Array:
        """Sample from logits f32[batch, vocab] on the host. -> s64[batch, 1], NOTHING where a row has ended"""
        self._note()
        whole = np.zeros((self.decoder.slots, 1, logits.shape[1]), np.float32)
        whole[: self.count, 0] = logits
        rows = self.rows
        slots = np.where(rows["left"] > 0, np.arange(self.decoder.slots), NOTHING)
        tokens = self.decoder.sample(self.decoder.runtime.put([whole]), slots, rows["position"], rows["policy"])
        return self.take(tokens[:, None], fed=0)

    def step(self) -> Array:
        """Feed each row's token. Return the logits for the next one, f32[batch, vocab]."""
        active = np.flatnonzero(self.wanted)
        logits = np.zeros((self.count, self.decoder.config.vocab_size), np.float32)
        position = self.rows["position"]
        tokens = list(self.rows["token"][active, None])
        rows = Rows(tokens, position[active].astype(np.int64), np.ones((len(active), 1), bool), active)
        logits[active] = self._feed(rows)[:, 0]
        position[active] += 1
        return logits

    def take(self, tokens: Array, fed: int = 1) -> Array:
        """Record sampled tokens, column by column. `fed` is 1 if the tokens before them went to the caches, else 0."""
        out = np.full((self.count, tokens.shape[1]), NOTHING, np.int64)
        for column in range(tokens.shape[1]):
            active = np.flatnonzero(self.wanted)
            sampled = tokens[active, column]
            check_sound(sampled, active)
            out[active, column] = sampled
            self.rows["token"][active] = sampled
            self.rows["position"][active] += fed
            self.rows["left"][active] -= 1
            self.rows["left"][active[np.isin(sampled, self.eos)]] = 0
            for row, token in zip(active, sampled.tolist(), strict=True):
                self.history[row].append(token)
        return out

    def by_host(self, count: int, process: Process) -> Iterator[Array]:
        """Yield columns of up to `count` tokens, as `on_devices` does, one by one: `process` changes the logits."""
        self.wanted[:] = count
        yield self.first(process)
        while self.wanted.any():
            yield self.sample(process(self.step()))

    def on_devices(self, count: int, steps: int, draft: Any = None, guesses: int = 0) -> Iterator[Array]:
        """Yield blocks of up to `count` tokens in total, s64[batch, ·]; NOTHING where a row has ended.

        Each row is a request. Steps generate up to `steps` tokens of each, or verify up to `guesses` of a `draft`.
        """
        if isinstance(draft, HeadCalls):
            self._loop = loop = draft.loop()
        else:
            self._loop = loop = call_loop(self.decoder, steps, None if draft is None else guesser_of(draft), guesses)
        prompts, given = len(self.prompts.tokens), 0
        states = self.decoder.programs.cache.has_states
        if states:  # a last token of a prompt that is fed again would change them twice
            self.decoder.repeat(prompts, self.repeats)
        for row in range(self.count if states else prompts):
            self._submit(row, int(self.prompts.start[row % prompts]), count)
        try:
            if self.repeats > 1 and not states:  # the others begin with the same tokens
                self._advance(loop)
                self.decoder.repeat(prompts, self.repeats)
                for row in range(prompts, self.count):
                    self._submit(row, len(self.history[row]) - 1, count)
            while any(request.reason is None for request in self._requests):
                self._advance(loop)
                block = self._since(given)
                if block.shape[1]:
                    yield block
                given += block.shape[1]
        finally:
            self.end(np.ones(len(self._requests), bool))
            for request in self._requests:
                self.decoder.leave(request.id, request.computed)

    def _advance(self, loop: Loop) -> None:
        with self.decoder.guarded():
            loop.advance()
        if broken := [row for row, request in enumerate(self._requests) if request.error]:
            raise no_token(broken)

    def _submit(self, row: int, computed: int, count: int) -> None:
        """Submit a row as a request, with the first tokens of its slot, up to `computed`."""
        tokens = [NOTHING] * int(self.prompts.start[row % len(self.prompts.tokens)]) + self.history[row]
        penalty = float(np.broadcast_to(self.rules.repetition_penalty, self.count)[row])
        params = SamplingParams(max_tokens=count, repetition_penalty=penalty)
        given = self.decoder.given(row, computed, len(tokens) + count)
        ends, policy = frozenset(self.eos), self.rows["policy"][row]
        prompt = self.prompts.pictured(row % len(self.prompts.tokens))
        how = dict(rules=policy, given=given, computed=computed, pictured=self.decoder.pictured(row, computed, prompt))
        self._requests.append(Request(row, tokens, params, ends, **how))
        assert self._loop is not None
        self._loop.scheduler.add(self._requests[-1])

    def _since(self, given: int) -> Array:
        """Return the tokens after the first `given` that all rows have which have not ended. -> s64[batch, ·]"""
        rows = [request.tokens[request.prompt_length + given :] for request in self._requests]
        running = [len(row) for row, request in zip(rows, self._requests, strict=True) if request.reason is None]
        block = np.full((self.count, min(running, default=max(map(len, rows)))), NOTHING, np.int64)
        for columns, row in zip(block, rows, strict=True):
            columns[: len(row)] = row[: len(columns)]
        return block

    def end(self, rows: Array) -> None:
        """Let these rows, pred[batch], have ended. One that has ended stays as it is."""
        self.wanted[np.flatnonzero(rows)] = 0
        if self._loop:
            for row in np.flatnonzero(rows):
                self._loop.scheduler.abort(self._requests[row], "stop")


def no_token(rows: Sequence[int]) -> EngineError:
    """Return the error that no token could be sampled for some rows."""
    return EngineError(f"the logits of rows {list(rows)} are NaN or all -inf: no token can be sampled")


def check_sound(tokens: Array, rows: Array) -> None:
    """Raise EngineError if no token could be sampled for a row."""
    if (tokens == BROKEN).any():
        raise no_token(rows[tokens == BROKEN].tolist())


class Speculator(Protocol):
    """Generates the tokens of a generation faster; they are the same as without it."""

    @property
    def models(self) -> Sequence[Any]:
        """Models that it calls in addition to the target."""
        ...

    def blocks(self, generation: Generation, count: int) -> Iterator[Array]:
        """Yield blocks of tokens as `Generation.on_devices` does."""
        ...


@dataclass
class Transcript:
    """The host's view of a generation, column by column.

    `columns` are the ids so far, the prompt first. After its end a row has `filler`. Rows also end when `criteria`
    return true for the ids so far. If `no_repeat_ngram_size` is given, no n-gram of that many tokens occurs twice.
    """

    columns: list[torch.Tensor]
    filler: int
    criteria: Criteria | None = None
    no_repeat_ngram_size: int | None = None
    keeps_scores: bool = False
    scores: list[torch.Tensor] = field(default_factory=list)
    made: int = 0  # tokens generated, in all rows

    @property
    def ids(self) -> torch.Tensor:
        return torch.cat(self.columns, 1)

    @property
    def process(self) -> Process | None:
        """The function that reads or changes logits, or None. With one, tokens are generated one at a time."""
        return self._process if self.keeps_scores or self.no_repeat_ngram_size else None

    def _process(self, logits: Array) -> Array:
        changed = torch.from_numpy(logits)
        if self.no_repeat_ngram_size:
            from transformers import NoRepeatNGramLogitsProcessor  # takes a second to import

            changed = NoRepeatNGramLogitsProcessor(self.no_repeat_ngram_size)(self.ids, changed)
        self.scores.append(changed)
        return changed.numpy()

    def read(self, blocks: Iterator[Array], generation: Generation) -> Iterator[torch.Tensor]:
        """Yield the columns of `blocks`, s64[batch] each, until all rows have ended."""
        done = torch.zeros(generation.count, dtype=torch.bool)
        for block in blocks:
            for column in torch.from_numpy(block).T:
                tokens = torch.where(done | (column < 0), self.filler, column)
                self.columns.append(tokens[:, None])
                self.made += int((~done & (column >= 0)).sum())
                yield tokens
                done |= torch.from_numpy(np.isin(column, [NOTHING, *generation.eos]))
                if self.criteria is not None:
                    done |= torch.as_tensor(self.criteria(self.ids, tuple(self.scores) or None))
                if done.all():
                    return
            generation.end(done.numpy())


def spread(logits: Array, rows: Rows) -> Array:
    """Move the logits of each row's tokens to the caller's columns; padding gets zeros. -> f32[batch, n, vocab]"""
    columns = np.zeros((len(logits), rows.real.shape[1], logits.shape[2]), np.float32)
    for row, real in enumerate(rows.real):
        columns[row, real] = logits[row, : real.sum()]
    return columns


class Streamer(Protocol):
    """Receives tokens as they are generated, such as Hugging Face's `TextStreamer`."""

    def put(self, value: torch.Tensor) -> None: ...
    def end(self) -> None: ...


@contextmanager
def streaming(streamer: Streamer | None, prompt: torch.Tensor | None) -> Iterator[Callable[[torch.Tensor], None]]:
    """Yield a function that passes tokens to the streamer, if any; always end the streamer.

    The streamer first gets the prompt, if there is one.
    """
    if streamer is None:
        yield lambda tokens: None
        return
    try:
        if prompt is not None:
            streamer.put(prompt)
        yield streamer.put
    finally:
        streamer.end()
