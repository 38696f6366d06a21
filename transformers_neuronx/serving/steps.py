"""Programs of a step of single tokens over a cache in pages. One program computes prompts' chunks and running rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers_neuronx import hlo
from transformers_neuronx.compiler import compile_py_func
from transformers_neuronx.engine.keys import ProgramKey
from transformers_neuronx.engine.kv_cache import CacheLayout, flattened, in_place
from transformers_neuronx.engine.programs import Programs
from transformers_neuronx.layers.rows import Row, columns, declare_rows, field, row_of
from transformers_neuronx.layers.sampling import NOTHING, POLICY_COLUMNS, sample, unpacked
from transformers_neuronx.layers.step import SEGMENT, Step
from transformers_neuronx.pyhlo import HloModuleProto, HloScribe, Tensor, dtype_named

# A token: its id, its position, the length of its sequence when it was first known, and its row among those that the
# step before chose, if only the devices know it; otherwise -1.
TOKEN = row_of(id=None, position=None, end=None, chosen=None)
# A sample: after which token, the position of the token that is sampled, and how.
SAMPLED = row_of(token=None, position=None, policy=POLICY_COLUMNS)
FEW = 8  # rows


@dataclass(frozen=True)
class TokensKey(ProgramKey):
    """A step of single tokens: tokens, sequences that they may be of, pages of a sequence, tokens that sample, and
    tokens that a step may have chosen before.
    """

    kind = "tokens"
    tokens: int
    segments: int
    pages: int
    samples: int
    chosen: int


@dataclass(frozen=True)
class CopyKey(ProgramKey):
    """Copying a page of each pool."""

    kind = "copy"
    pools: int


def copy_module(layout: CacheLayout, key: CopyKey) -> HloModuleProto:
    """Write the program that copies a page of each pool, for layers with each of the layout's windows.

    Parameters: s32[pools, 2], from and to; the caches. Results: the caches, in place.
    """

    def program(scribe: HloScribe) -> list[Tensor]:
        parameters = hlo.Parameters()
        pairs = parameters.add(dtype_named("s32")[key.pools, 2], "pages")
        before, after = layout.declare(parameters, layout.layers), []
        for cache, layer in zip(before, layout.of_layers, strict=True):
            count = len(layer.kept)
            row = layout.windows.index(layer.window) if count else 0
            pair = [hlo.reshape(hlo.slice(hlo.slice(pairs, 0, row, row + 1), 1, i, i + 1)) for i in range(2)]
            after += [*(_copied(each, layer.slots, *pair) for each in cache[:count]), *cache[count:]]
        return in_place(after, flattened(before))

    return compile_py_func(program)


def _copied(cache: Tensor, pages: int, source: Tensor, target: Tensor) -> Tensor:
    """Copy a page of a cache [pages * heads, positions, d]."""
    heads, zero = cache.sizes[0] // pages, hlo.constant(0, "s32")
    page = hlo.dynamic_slice(cache, [source * heads, zero, zero], [heads, *cache.sizes[1:]])
    return hlo.dynamic_update_slice(cache, page, [target * heads, zero, zero])


def keys_of(tokens: int, rows: int, pages: int, guesses: int = 0) -> list[TokensKey]:
    """List the programs for steps of up to `tokens` tokens and `rows` sequences of `pages` pages.

    Up to `rows` tokens, and their `guesses`, each may sample. Longer steps sample after none, a few, or as many.
    """
    sequences, most = powers(rows)[-1], powers(min(rows * (1 + guesses), tokens))[-1]
    longer = powers(tokens)
    longer = sorted({*longer, *(3 * size // 4 for size in longer if size >= 128)})  # less padding where tokens cost
    some = sorted({0, min(FEW, most), most})
    return [
        TokensKey(size, min(size, sequences), pages, samples, most)
        for size in longer
        for samples in ([size] if size <= most else some)
    ]


def powers(most: int) -> list[int]:
    """Return 1, 2, 4, … up to the first that is at least `most`."""
    return [1 << power for power in range((most - 1).bit_length() + 1)]


def sequence_row(layout: CacheLayout, pages: int) -> Row:
    """Return the row of a sequence: `SEGMENT`, a table of so many pages for each of the layout's windows, and if layers
    have states, the places where these are and will be.
    """
    sizes = dict(pages=len(layout.windows) * pages) | (dict(places=2) if layout.has_states else {})
    return row_of(**dict.fromkeys(SEGMENT.names or ()), **sizes)


def segments_of(layout: CacheLayout, packed: Tensor) -> dict[int | None, Tensor]:
    """Return the segments of `Step` for layers with each window, given a `sequence_row` for each sequence."""
    own, windows = columns(SEGMENT), layout.windows
    if len(windows) == 1 and not layout.has_states:
        return {windows[0]: packed}
    pages = (packed.sizes[1] - own - 2 * layout.has_states) // max(len(windows), 1)
    head, segments = hlo.slice(packed, 1, 0, own), {}
    for place, window in enumerate(windows):
        table = hlo.slice(packed, 1, own + place * pages, own + (place + 1) * pages)
        segments[window] = hlo.concatenate([head, table], 1)
    return {cache.window: head for cache in layout.kinds.values()} | segments


def step_module(programs: Programs, layout: CacheLayout, key: TokensKey) -> HloModuleProto:
    """Write the program of a step.

    Parameters: a row of `TOKEN` for each token; a `sequence_row` for each sequence; the tokens that the step before
    chose, s32[chosen]; if some sample, a row of `SAMPLED` for each; the caches; the weights. Results: tokens
    s32[chosen], NOTHING after those of the samples, and logits f32[samples, 1, vocab]; or if none sample, any number,
    f32[1], to wait for; the caches, in place.
    """

    def program(scribe: HloScribe) -> list[Tensor]:
        parameters = hlo.Parameters()
        packed = declare_rows(parameters, TOKEN, key.tokens, "tokens")
        row_of_sequence = sequence_row(layout, key.pages)
        segments = declare_rows(parameters, row_of_sequence, key.segments, "segments")
        places = field(segments, row_of_sequence, "places") if layout.has_states else None
        before = parameters.add(dtype_named("s32")[key.chosen], "before")
        rules = [declare_rows(parameters, SAMPLED, key.samples, "samples")] if key.samples else []
        ids, position, end, row = (field(packed, TOKEN, name) for name in ("id", "position", "end", "chosen"))
        ids = hlo.select(row >= 0, hlo.maximum(hlo.take(before, hlo.maximum(row, 0)), 0), ids)
        step = Step(hlo.reshape(ids, -1, 1), position, hlo.full(1, "s32", [key.tokens]), end, None, 0, places=places)
        caches = layout.declare(parameters, layout.layers)
        shared, layers = programs.declare_weights(parameters, programs.whole)
        own = segments_of(layout, segments)
        x, after = programs.body(scribe, programs.whole, shared, layers, None, caches, step, own)
        results = [result for packed in rules for result in _sampled(scribe, programs, shared, x, packed, key.chosen)]
        results = results or [hlo.convert(hlo.slice(hlo.reshape(x, -1), 0, 0, 1), "f32")]
        return [*results, *in_place(flattened(after), flattened(caches))]

    return compile_py_func(program)


def _sampled(
    scribe: HloScribe, programs: Programs, shared: Any, x: Tensor, packed: Tensor, chosen: int
) -> list[Tensor]:
    """Sample after some of the tokens x [tokens, 1, h]. Return tokens s32[chosen] and logits f32[samples, 1, vocab]."""
    rows, position = (field(packed, SAMPLED, name) for name in ("token", "position"))
    logits = programs.logits(scribe, shared, hlo.take(x, rows))
    policy = unpacked(field(packed, SAMPLED, "policy"))
    flat = hlo.reshape(logits, rows.sizes[0], -1)
    tokens = sample(flat, hlo.full(0, "pred", flat.sizes), policy, position)
    return [padded(tokens, chosen), logits]


def padded(tokens: Tensor, size: int) -> Tensor:
    """Add NOTHING after tokens s32[·], up to `size`."""
    rest = size - tokens.sizes[0]
    return hlo.concatenate([tokens, hlo.full(NOTHING, "s32", [rest])], 0) if rest else tokens


def smallest(keys: Sequence[TokensKey], tokens: int, samples: int) -> TokensKey:
    """Return the key of the smallest step for this many tokens, where so many sample."""
    fits = (key for key in keys if key.tokens >= tokens and key.samples >= samples)
    return min(fits, key=lambda key: (key.tokens, key.samples))
