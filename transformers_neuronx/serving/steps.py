"""Programs of an engine: a step of single tokens over a cache in pages, and the choice of tokens from its logits.

One program computes prompts' chunks and running rows alike. Logits stay on the devices. A second, small program chooses
from them; requests that need more than rules of sampling have a variant of it, which the others do not pay for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers_neuronx import hlo
from transformers_neuronx.compiler import compile_py_func
from transformers_neuronx.keys import ProgramKey
from transformers_neuronx.kv_cache import CacheLayout, flattened
from transformers_neuronx.layers.activation import softmax
from transformers_neuronx.layers.sampling import POLICY_COLUMNS, sample, unpacked
from transformers_neuronx.layers.step import SEGMENT, Step
from transformers_neuronx.programs import Programs, in_place
from transformers_neuronx.pyhlo import HloModuleProto, HloScribe, Tensor, dtype_named

TOKEN = 3  # columns of a token: its id, its position, and the length of its sequence after all known tokens
LIKELIEST = 20  # tokens with log-probabilities, at most


@dataclass(frozen=True)
class TokensKey(ProgramKey):
    """A step of single tokens: tokens, sequences that they may be of, pages of a sequence, and tokens that sample."""

    kind = "tokens"
    tokens: int
    segments: int
    pages: int
    samples: int


@dataclass(frozen=True)
class ChooseKey(ProgramKey):
    """The choice of a token for each of some rows; `adjusted` if logits are changed before."""

    kind = "choose"
    rows: int
    adjusted: bool


@dataclass(frozen=True)
class LogprobsKey(ProgramKey):
    """Log-probabilities of each row's token, and of its likeliest ones."""

    kind = "logprobs"
    rows: int


def keys_of(tokens: int, rows: int, pages: int) -> list[ProgramKey]:
    """List the programs for steps of up to `tokens` tokens and `rows` sequences of `pages` pages.

    Up to `rows` tokens, each may sample. Longer steps sample after none, one, or as many.
    """
    sizes = _powers(tokens)
    steps = [
        TokensKey(size, min(size, rows), pages, samples)
        for size in sizes
        for samples in ([size] if size <= rows else [0, 1, _powers(rows)[-1]])
    ]
    chosen = sorted({key.samples for key in steps} - {0})
    return [
        *steps,
        *(ChooseKey(count, adjusted) for count in chosen for adjusted in (False, True)),
        *(LogprobsKey(count) for count in chosen),
    ]


def _powers(most: int) -> list[int]:
    """Return 1, 2, 4, … up to the first that is at least `most`."""
    return [1 << power for power in range((most - 1).bit_length() + 1)]


def module(programs: Programs, layout: CacheLayout, key: ProgramKey) -> HloModuleProto:
    """Write the program of a key."""
    match key:
        case TokensKey():
            return _step(programs, layout, key)
        case ChooseKey():
            return _choose(programs, key)
        case LogprobsKey():
            return _logprobs(programs, key)
        case _:
            raise TypeError(f"no engine has a program {key.name}")


def _step(programs: Programs, layout: CacheLayout, key: TokensKey) -> HloModuleProto:
    """Write a step.

    Parameters: the tokens, s32[tokens, TOKEN]; segments s32[segments, SEGMENT + pages], as in `Step`; if some sample,
    which ones, s32[samples]; the caches; the weights. Results: logits f32[samples, 1, vocab] if some sample; the
    caches, in place.
    """

    def program(scribe: HloScribe) -> list[Tensor]:
        parameters = hlo.Parameters()
        packed = parameters.add(dtype_named("s32")[key.tokens, TOKEN], "tokens")
        segments = parameters.add(dtype_named("s32")[key.segments, SEGMENT + key.pages], "segments")
        chosen = [parameters.add(dtype_named("s32")[key.samples], "samples")] if key.samples else []
        ids, position, end = (hlo.reshape(hlo.slice(packed, 1, i, i + 1), key.tokens) for i in range(TOKEN))
        step = Step(
            hlo.reshape(ids, -1, 1), position, hlo.full(1, "s32", [key.tokens]), end, None, 0, segments=segments
        )
        caches = layout.declare(parameters, len(programs.layers))
        shared, layers = programs.declare_weights(parameters, programs.whole)
        x, after = programs.body(scribe, programs.whole, shared, layers, None, caches, step)
        logits = [programs.logits(scribe, shared, hlo.take(x, rows)) for rows in chosen]
        return [*logits, *in_place(flattened(after), flattened(caches))]

    return compile_py_func(program)


def _choose(programs: Programs, key: ChooseKey) -> HloModuleProto:
    """Write the choice of tokens.

    Parameters: logits f32[rows, 1, vocab]; s32[rows, 1 + POLICY_COLUMNS], the position and policy of each row; if
    adjusted, what is added to logits, f32[rows, vocab], and the tokens that a sequence has, pred[rows, vocab], for the
    repetition penalty. Result: tokens s32[rows].
    """
    rows, vocab = key.rows, programs.config.vocab_size

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
        return sample(logits, seen, unpacked(hlo.slice(packed, 1, 1, 1 + POLICY_COLUMNS)), position)

    return compile_py_func(program)


def _logprobs(programs: Programs, key: LogprobsKey) -> HloModuleProto:
    """Write log-probabilities of tokens, before any rule of sampling.

    Parameters: logits f32[rows, 1, vocab]; tokens s32[rows]. Results: those of the tokens, f32[rows]; the LIKELIEST
    tokens, s32[rows, ·], and theirs, f32[rows, ·].
    """
    rows, vocab = key.rows, programs.config.vocab_size

    def program(scribe: HloScribe) -> list[Tensor]:
        parameters = hlo.Parameters()
        logits = hlo.reshape(parameters.add(dtype_named("f32")[rows, 1, vocab], "logits"), rows, vocab)
        tokens = parameters.add(dtype_named("s32")[rows], "tokens")
        logs = hlo.log(softmax(logits))
        values, ids = hlo.top_k(logs, min(LIKELIEST, vocab))
        return [hlo.take_rows(logs, hlo.maximum(tokens, 0)), ids, values]

    return compile_py_func(program)


def smallest(keys: Sequence[ProgramKey], tokens: int, samples: int) -> TokensKey:
    """Return the key of the smallest step for this many tokens, where so many sample."""
    steps = (key for key in keys if isinstance(key, TokensKey))
    fits = (key for key in steps if key.tokens >= tokens and key.samples >= samples)
    return min(fits, key=lambda key: (key.tokens, key.samples))
