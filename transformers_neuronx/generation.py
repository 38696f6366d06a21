"""From rows of tokens to logits, and from logits to more tokens.

`Rules` is what a caller asks for; `feed` brings tokens of any number in windows that programs take; `Generation` is the
loop over tokens, on the devices in chunks or, where the host has to look at logits, one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from transformers_neuronx.decoder import Decoder
from transformers_neuronx.errors import EngineError, InputError
from transformers_neuronx.inputs import Rows
from transformers_neuronx.layers.choice import BROKEN, NOTHING
from transformers_neuronx.loops import EOS, EOS_COLUMNS, LOOP_COLUMNS, POLICY

Array = np.ndarray[Any, Any]
Number = float | Sequence[float]
Criteria = Callable[[torch.Tensor, Any], Any]  # ids so far, scores -> whether to stop: all, or row by row
Process = Callable[[Array], Array]  # logits f32[b, vocab] -> logits


@dataclass(frozen=True)
class Rules:
    """How tokens are chosen, for all rows alike or with a value for each.

    `top_k` likeliest tokens (1 is greedy, 0 all), of those the fewest that reach the probability `top_p`, and of those
    the ones with `min_p` of the likeliest's. `repetition_penalty` divides the logits of tokens already there.
    """

    top_k: int | Sequence[int] = 50
    top_p: Number = 1.0
    temperature: Number = 1.0
    min_p: Number = 0.0
    repetition_penalty: Number = 1.0
    seed: int | None = None
    _entropy: np.random.SeedSequence = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        checks: list[tuple[str, str, Callable[[Array], Any]]] = [
            ("top_k", "at least 1, or 0 for all tokens", lambda x: (x >= 0) & (x == np.floor(x))),
            ("top_p", "to be above 0 and at most 1", lambda x: (x > 0) & (x <= 1)),
            ("temperature", "to be above 0 (greedy choice is top_k=1)", lambda x: (x > 0) & np.isfinite(x)),
            ("min_p", "to be from 0 to 1", lambda x: (x >= 0) & (x <= 1)),
            ("repetition_penalty", "to be above 0", lambda x: (x > 0) & np.isfinite(x)),
        ]
        for name, wanted, holds in checks:
            value = np.asarray(getattr(self, name))
            if value.dtype.kind not in "iuf" or value.ndim > 1 or not holds(value).all():
                raise InputError(f"{name} wants {wanted}, got {getattr(self, name)}")
        if self.seed is not None and self.seed < 0:
            raise InputError(f"seed wants to be 0 or more, got {self.seed}")
        object.__setattr__(self, "_entropy", np.random.SeedSequence(self.seed))

    def packed(self, rows: int) -> Array:
        """The columns of `layers.choice.Policy`, as bits. s32[rows, POLICY_COLUMNS]"""
        columns = []
        for name in ("top_k", "temperature", "top_p", "min_p", "repetition_penalty"):
            value = np.asarray(getattr(self, name), np.int32 if name == "top_k" else np.float32)
            if value.ndim and len(value) != rows:
                raise InputError(f"{name} wants one value or one for each of {rows} rows, got {len(value)}")
            columns.append(np.broadcast_to(value, rows).view(np.int32))
        seed = np.broadcast_to(self._entropy.generate_state(1), rows).view(np.int32)
        return np.stack([*columns, seed, np.arange(rows, dtype=np.int32)], 1)


def feed(decoder: Decoder, rows: Rows, every: bool = False) -> Array:
    """Logits after the last token of each row, or after `every` one; long rows go in several windows.

    Prompts go in groups of `prompt_batch_size`; single tokens all together. -> f32[batch, 1 or the longest row, vocab]
    """
    options = decoder.options
    lengths = np.array([len(row) for row in rows.tokens])
    logits = np.zeros((len(lengths), lengths.max() if every else 1, decoder.config.vocab_size), np.float32)
    size = options.batch_size if lengths.max() == 1 else options.prompt_batch_size
    groups: list[tuple[Array, Array]] = []  # rows, and where in the program
    if size == options.batch_size:
        groups.append((np.arange(len(lengths)), rows.slots))
    else:
        parts = np.split(np.arange(len(lengths)), range(size, len(lengths), size))
        groups.extend((part, np.arange(len(part))) for part in parts)
    for members, lanes in groups:
        slots = np.arange(size) if size == options.batch_size else np.zeros(size, np.int64)
        slots[lanes] = rows.slots[members]
        start, left = np.zeros((2, size), np.int64)
        start[lanes], left[lanes] = rows.start[members], lengths[members]
        end, fed = start + left, np.zeros(size, np.int64)
        while left.any():
            active = 1 if left.max() == 1 else options.buckets.active(int(left.max()))
            now = np.minimum(left, active)
            ids = np.zeros((size, active), np.int64)
            for row, lane in zip(members, lanes, strict=True):
                ids[lane, : now[lane]] = rows.tokens[row][fed[lane] : fed[lane] + now[lane]]
            out = decoder.run(ids, start + fed, now, end, slots, every)
            left -= now
            for row, lane in zip(members, lanes, strict=True):
                if every:
                    logits[row, fed[lane] : fed[lane] + now[lane]] = out[lane, : now[lane]]
                elif now[lane] and not left[lane]:
                    logits[row] = out[lane]
            fed += now
    return logits


class Generation:
    """Sequences in the slots 0, 1, …, from the logits after their prompts on.

    `tokens` are the prompts, row by row; `end` where the next token goes; `eos` what ends a row.
    """

    def __init__(self, decoder: Decoder, tokens: Sequence[Array], end: Array, rules: Rules, eos: Sequence[int]) -> None:
        if len(eos) > EOS_COLUMNS:
            raise InputError(f"eos_token_id wants at most {EOS_COLUMNS} tokens, got {len(eos)}")
        self.decoder = decoder
        self.count = len(tokens)
        self.eos = list(eos)
        slots, vocab = decoder.slots, decoder.config.vocab_size
        self.rows = np.zeros((slots, LOOP_COLUMNS), np.int32)  # as `Programs.loop` has them
        self.rows[: self.count, 1] = end
        self.rows[:, POLICY] = Rules(1, seed=0).packed(slots)
        self.rows[: self.count, POLICY] = rules.packed(self.count)
        self.rows[:, EOS] = [*eos, *[-1] * (EOS_COLUMNS - len(eos))]
        self.seen = np.zeros((slots, vocab), bool)
        self.history = [ids.tolist() for ids in tokens]
        for row, ids in enumerate(tokens):
            self.seen[row, ids] = True

    @property
    def wanted(self) -> Array:
        """How many tokens each row still wants; zero ends it."""
        return self.rows[: self.count, 2]

    def choose(self, logits: Array) -> Array:
        """Each row's next token, s64[batch]; NOTHING for rows that want none. logits f32[batch, vocab]"""
        whole = np.zeros(self.seen.shape, np.float32)
        whole[: self.count] = logits
        rows = np.concatenate([self.rows[:, 1:2], self.rows[:, POLICY]], 1)
        tokens = self.decoder.choose(whole, self.seen, rows)
        return self.take(tokens[:, None], fed=0)[:, 0]

    def run(self, steps: int) -> Array:
        """Up to `steps` more tokens of each row, on the devices. -> s64[batch, ·]"""
        before = self.rows[:, 2].copy()
        tokens = self.decoder.loop(self.rows, self.seen, steps)
        made = int((tokens[before > 0] != NOTHING).sum(1).max())
        return self.take(tokens[:, :made])

    def check(self, guesses: Array) -> Array:
        """The tokens that guesses for them turn out to be right about, and one more. -> s64[batch, ·]

        guesses s64[batch, k]; as many tokens as the row with the fewest right guesses has.
        """
        decoder, count = self.decoder, guesses.shape[1] + 1
        ids = np.zeros((decoder.slots, count), np.int32)
        ids[:, 0] = self.rows[:, 0]
        ids[: self.count, 1:] = np.maximum(guesses, 0)
        length = np.minimum(self.rows[:, 2], count)
        tokens = decoder.verify(ids, self.rows[:, 1], length, self.rows[:, POLICY], self.seen)
        right = (ids[:, 1:] == tokens[:, :-1]).cumprod(1).sum(1)
        ended = np.isin(tokens, self.eos) & (np.arange(count) <= right[:, None])
        right = np.where(ended.any(1), count, right)[length > 0]
        return self.take(tokens[:, : min(right.min() + 1, length.max())])

    def step(self) -> Array:
        """Feed each row's token; the logits for the next. f32[batch, vocab]"""
        active = np.flatnonzero(self.wanted)
        logits = np.zeros((self.count, self.seen.shape[1]), np.float32)
        tokens = [self.rows[row, :1] for row in active]
        rows = Rows(tokens, self.rows[active, 1].astype(np.int64), np.ones((len(active), 1), bool), active)
        logits[active] = feed(self.decoder, rows)[:, 0]
        self.rows[active, 1] += 1
        return logits

    def take(self, tokens: Array, fed: int = 1) -> Array:
        """Note what was chosen, column by column; `fed` of the tokens before it went to the caches."""
        out = np.full((self.count, tokens.shape[1]), NOTHING, np.int64)
        for column in range(tokens.shape[1]):
            active = np.flatnonzero(self.wanted)
            chosen = tokens[active, column]
            if (chosen == BROKEN).any():
                broken = active[chosen == BROKEN].tolist()
                raise EngineError(f"the logits of rows {broken} are NaN or all -inf: no token can be chosen")
            out[active, column] = chosen
            self.rows[active, 0] = chosen
            self.rows[active, 1] += fed
            self.rows[active, 2] -= 1
            self.rows[active[np.isin(chosen, self.eos)], 2] = 0
            self.seen[active, chosen] = True
            for row, token in zip(active, chosen.tolist(), strict=True):
                self.history[row].append(token)
        return out


def generate(
    generation: Generation, logits: Array, count: int, steps: int, process: Process | None = None
) -> Iterator[Array]:
    """Blocks of up to `count` tokens in all, s64[batch, ·], NOTHING where a row has ended. Stops when all have.

    The first are chosen from `logits`; then `steps` at a time are made on the devices, or, with `process`, which may
    change logits f32[batch, vocab], one at a time.
    """
    generation.wanted[:] = count
    on_host = process is not None or not generation.decoder.loops
    change = process or (lambda logits: logits)
    yield generation.choose(change(logits))[:, None]
    while generation.wanted.any():
        yield generation.choose(change(generation.step()))[:, None] if on_host else generation.run(steps)


class Speculator(Protocol):
    """Makes the tokens of a generation in its own way, the same ones."""

    def blocks(self, generation: Generation, rows: Rows, logits: Array, count: int) -> Iterator[Array]:
        """As `generate`; `rows` are the prompts."""
        ...


@dataclass
class Transcript:
    """What the host sees of a generation, column by column, and has a say in.

    `columns` are the ids so far, the prompt first. After its end a row has `filler`. Rows also end where `criteria` say
    so of the ids up to there. No n-gram of `no_repeat_ngram_size` tokens comes twice, if that is given.
    """

    columns: list[torch.Tensor]
    filler: int
    criteria: Criteria | None = None
    no_repeat_ngram_size: int | None = None
    keeps_scores: bool = False
    scores: list[torch.Tensor] = field(default_factory=list)
    made: int = 0  # tokens, of all rows

    @property
    def ids(self) -> torch.Tensor:
        return torch.cat(self.columns, 1)

    @property
    def process(self) -> Process | None:
        """What looks at logits, if anything does: then tokens have to be made one at a time."""
        return self._process if self.keeps_scores or self.no_repeat_ngram_size else None

    def _process(self, logits: Array) -> Array:
        changed = torch.from_numpy(logits)
        if self.no_repeat_ngram_size:
            from transformers import NoRepeatNGramLogitsProcessor  # takes a second to import

            changed = NoRepeatNGramLogitsProcessor(self.no_repeat_ngram_size)(self.ids, changed)
        self.scores.append(changed)
        return changed.numpy()

    def read(self, blocks: Iterator[Array], generation: Generation) -> Iterator[torch.Tensor]:
        """The columns of `blocks`, s64[batch] each, up to where all rows have ended."""
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
            generation.wanted[done.numpy()] = 0


def spread(logits: Array, rows: Rows, repeats: int) -> Array:
    """Logits of each row's tokens at the columns where the caller has them. -> f32[batch, n, vocab]"""
    columns = np.zeros((len(logits), rows.real.shape[1], logits.shape[2]), np.float32)
    for row, real in enumerate(np.tile(rows.real, (repeats, 1))):
        columns[row, real] = logits[row, : real.sum()]
    return columns


class Streamer(Protocol):
    """What takes tokens as they come: Hugging Face's `TextStreamer` is one."""

    def put(self, value: torch.Tensor) -> None: ...
    def end(self) -> None: ...


@contextmanager
def streaming(streamer: Streamer | None, prompt: torch.Tensor) -> Iterator[Callable[[torch.Tensor], None]]:
    """What takes tokens to the streamer, if there is one, which gets the prompt first and is told of the end always."""
    if streamer is None:
        yield lambda tokens: None
        return
    try:
        streamer.put(prompt)
        yield streamer.put
    finally:
        streamer.end()
