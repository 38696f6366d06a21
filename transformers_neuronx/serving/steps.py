"""Programs of a step of single tokens over a cache in pages. One program computes prompts' chunks and running rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers_neuronx import hlo
from transformers_neuronx.compiler import compile_py_func
from transformers_neuronx.keys import ProgramKey
from transformers_neuronx.kv_cache import CacheLayout, flattened
from transformers_neuronx.layers.step import SEGMENT, Step
from transformers_neuronx.programs import Programs, in_place
from transformers_neuronx.pyhlo import HloModuleProto, HloScribe, Tensor, dtype_named

TOKEN = 3  # columns of a token: its id, its position, and the length of its sequence after all known tokens


@dataclass(frozen=True)
class TokensKey(ProgramKey):
    """A step of single tokens: tokens, sequences that they may be of, pages of a sequence, and tokens that sample."""

    kind = "tokens"
    tokens: int
    segments: int
    pages: int
    samples: int


def keys_of(tokens: int, rows: int, pages: int) -> list[TokensKey]:
    """List the programs for steps of up to `tokens` tokens and `rows` sequences of `pages` pages.

    Up to `rows` tokens, each may sample. Longer steps sample after none, one, or as many.
    """
    most = powers(rows)[-1]
    return [
        TokensKey(size, min(size, most), pages, samples)
        for size in powers(tokens)
        for samples in ([size] if size <= most else [0, 1, most])
    ]


def powers(most: int) -> list[int]:
    """Return 1, 2, 4, … up to the first that is at least `most`."""
    return [1 << power for power in range((most - 1).bit_length() + 1)]


def step_module(programs: Programs, layout: CacheLayout, key: TokensKey) -> HloModuleProto:
    """Write the program of a step.

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


def smallest(keys: Sequence[TokensKey], tokens: int, samples: int) -> TokensKey:
    """Return the key of the smallest step for this many tokens, where so many sample."""
    fits = (key for key in keys if key.tokens >= tokens and key.samples >= samples)
    return min(fits, key=lambda key: (key.tokens, key.samples))
