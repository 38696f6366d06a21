"""Speculative decoding: a cheap proposer guesses the next tokens, and the model checks them all in one step.

The noise of a draw follows from seed, row and position alone, so what the model would draw after each guess is known as
soon as its logits are. A guess is right when it is that very token. So the tokens are those that the model makes alone,
greedy or drawn, whatever the proposer; only how many of them a step gives depends on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from transformers_neuronx.errors import ConfigError
from transformers_neuronx.feeding import feed
from transformers_neuronx.generation import Generation
from transformers_neuronx.inputs import Integers, Rows
from transformers_neuronx.keys import VerifyKey
from transformers_neuronx.loops import EOS
from transformers_neuronx.sampling import ForSampling

Array = np.ndarray[Any, Any]


class Proposer(Protocol):
    """Guesses tokens, cheaply, for the rows of a generation that still want some."""

    def start(self, rows: Rows) -> None:
        """The prompts that the target is given."""
        ...

    def propose(self, generation: Generation, count: int) -> Array:
        """`count` guesses after each row's token. -> s64[batch, count]"""
        ...


class Draft:
    """A smaller model with the same vocabulary makes the guesses, by the same rules and with the same noise."""

    def __init__(self, model: ForSampling) -> None:
        self.model = model
        self._fed = np.zeros(model.options.batch_size, np.int64)  # positions that are in the caches, of each row

    def start(self, rows: Rows) -> None:
        feed(self.model.decoder, rows)
        self._fed[rows.slots] = rows.end

    def propose(self, generation: Generation, count: int) -> Array:
        decoder, positions = self.model.decoder, generation.rows[: generation.count, 1].astype(np.int64)
        behind = np.flatnonzero((generation.wanted > 0) & (self._fed[: generation.count] < positions))
        if behind.size:  # the last guesses were right, and the draft was not fed them
            missing = positions[behind] - self._fed[behind]
            tokens = [np.array(generation.history[row][-1 - n : -1]) for row, n in zip(behind, missing, strict=True)]
            feed(decoder, Rows(tokens, self._fed[behind], np.ones((len(behind), 1), bool), behind))
        asked = generation.rows.copy()
        asked[:, 2] = np.minimum(asked[:, 2], count)
        asked[:, EOS] = -1
        if decoder.loops:
            asked[:, 2] = np.minimum(asked[:, 2], decoder.options.chunk)
        self._fed[: generation.count] = positions + asked[: generation.count, 2]
        generation.note(decoder)
        guesses = decoder.loop(asked, count)[: generation.count].astype(np.int64)
        return np.pad(guesses, [(0, 0), (0, count - guesses.shape[1])], mode="edge")


@dataclass(frozen=True)
class PromptLookup:
    """No model: the guesses are what followed the last `ngram` tokens, or fewer, where they last stood in the row."""

    ngram: int = 3

    def start(self, rows: Rows) -> None:
        """Nothing to do: the rows themselves are looked at."""

    def propose(self, generation: Generation, count: int) -> Array:
        """`count` guesses for each row; where nothing like its end came before, its last token. -> s64[batch, count]"""
        return np.stack([self._after_last(np.array(row), count) for row in generation.history])

    def _after_last(self, ids: Array, count: int) -> Array:
        for size in range(min(self.ngram, len(ids) - 1), 0, -1):
            windows = np.lib.stride_tricks.sliding_window_view(ids[:-1], size)
            found = np.flatnonzero((windows == ids[-size:]).all(1))
            if found.size:
                guess = ids[found[-1] + size :][:count]
                return np.pad(guess, (0, count - len(guess)), constant_values=ids[-1])
        return np.full(count, ids[-1])


class SpeculativeGenerator:
    """`sample()` of `target`, faster where `draft` guesses well: `k` tokens at a time.

    `draft` is a model for the same batch and vocabulary, or None for guesses from the prompt itself (`PromptLookup`).
    The program that checks guesses is compiled here, or by `to_neuron` of a target that is not on its devices yet.
    """

    def __init__(self, draft: ForSampling | PromptLookup | None, target: ForSampling, k: int = 4) -> None:
        if k < 1:
            raise ConfigError(f"k wants at least one guess, got {k}")
        if isinstance(draft, ForSampling):
            check_pair(draft, target)
        self.proposer: Proposer = Draft(draft) if isinstance(draft, ForSampling) else draft or PromptLookup()
        self.target = target
        self.k = k
        target.compile_also(
            ("verify", k), lambda decoder: [VerifyKey(k + 1, w) for w in decoder.programs.widths(1) if w > k]
        )

    @property
    def models(self) -> list[ForSampling]:
        """Those that are called besides the target."""
        return [self.proposer.model] if isinstance(self.proposer, Draft) else []

    def sample(self, input_ids: Integers, sequence_length: int, **options: Any) -> Any:
        """As the target's own `sample`, with its options and its result."""
        return self.target.sample(input_ids, sequence_length, speculator=self, **options)

    def blocks(self, generation: Generation, count: int) -> Iterator[Array]:
        """As `generation.generate`, made by checking `k` guesses at a time."""
        generation.wanted[:] = count
        self.proposer.start(generation.prompts)
        yield generation.first()
        while generation.wanted.any():
            yield generation.check(self.proposer.propose(generation, self.k))


def check_pair(draft: ForSampling, target: ForSampling) -> None:
    """Raise ConfigError where the two do not go together."""
    for name, ours, theirs in (
        ("vocab_size", draft.config.vocab_size, target.config.vocab_size),
        ("batch_size", draft.options.batch_size, target.options.batch_size),
    ):
        if ours != theirs:
            raise ConfigError(f"{name} wants to be the same for draft and target, got {ours} and {theirs}")
    if (ours := draft.options.buckets.longest) < (theirs := target.options.buckets.longest):
        raise ConfigError(f"n_positions wants to be at least the target's {theirs} for the draft, got {ours}")
