"""Programs of a step of single tokens over a cache in pages. One program computes prompts' chunks and running rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from transformers_neuronx import hlo
from transformers_neuronx.compiler import compile_py_func
from transformers_neuronx.engine.keys import ProgramKey, Segment
from transformers_neuronx.engine.kv_cache import CacheLayout, flattened, in_place
from transformers_neuronx.engine.programs import Programs
from transformers_neuronx.layers.rows import declare_joined, field
from transformers_neuronx.layers.sampling import NOTHING
from transformers_neuronx.layers.step import Step
from transformers_neuronx.layers.storage import put_rows
from transformers_neuronx.pyhlo import HloModuleProto, HloScribe, Tensor, dtype_named
from transformers_neuronx.serving.step_writer import (
    LOGITS,
    SAMPLED,
    TOKEN,
    StepWriter,
    padded,
    segments_of,
    sequence_row,
)

FEW = 8  # rows


@dataclass(frozen=True)
class TokensKey(ProgramKey):
    """A step of single tokens: tokens, sequences that they may be of, tokens that sample, pages of a sequence, and
    tokens that a step may have chosen before, if it starts before they are known. With `hidden`, it returns the hidden
    states of all tokens; otherwise the last layer computes only those of tokens that sample. With `features`, it
    returns those of all tokens, too.
    """

    kind = "step"
    tokens: int
    sequences: int
    samples: int
    pages: int
    chosen: int
    hidden: bool = False
    features: bool = False

    @property
    def name(self) -> str:
        """The key as text: `step_tokens64_sequences8_samples8`. A model's cache determines the number of pages."""
        more = f"_after{self.chosen}" * bool(self.chosen) + "_hidden" * self.hidden + "_features" * self.features
        return f"step_tokens{self.tokens}_sequences{self.sequences}_samples{self.samples}{more}"

    @property
    def rounds(self) -> bool:
        """Whether it can generate several tokens of each sequence."""
        return self.samples == self.tokens == self.sequences and not self.features

    def written(self, programs: Programs, segment: Segment) -> HloModuleProto:
        return step_module(programs, self)


@dataclass(frozen=True)
class LogitsKey(ProgramKey):
    """A step of single tokens that returns logits: tokens, sequences that they may be of, pages of a sequence, and
    tokens whose logits it returns.
    """

    kind = "logits"
    tokens: int
    sequences: int
    pages: int
    logits: int

    @property
    def name(self) -> str:
        """The key as text, as that of `TokensKey`: `logits_tokens64_sequences8_logits64`."""
        return f"logits_tokens{self.tokens}_sequences{self.sequences}_logits{self.logits}"

    def written(self, programs: Programs, segment: Segment) -> HloModuleProto:
        return logits_module(programs, self)


@dataclass(frozen=True)
class LayerKey(ProgramKey):
    """A step of one sequence with one program per layer: tokens, and pages of the sequence."""

    kind = "layerwise"
    divides = layerwise = True
    tokens: int
    pages: int

    def written(self, programs: Programs, segment: Segment) -> HloModuleProto:
        return layer_module(programs, self, segment)


@dataclass(frozen=True)
class CopyKey(ProgramKey):
    """Copying a page for each window."""

    kind = "copy"

    def written(self, programs: Programs, segment: Segment) -> HloModuleProto:
        return copy_module(programs.cache)


def copy_module(layout: CacheLayout) -> HloModuleProto:
    """Write the program that copies a page for the layers with each of the layout's windows.

    Parameters: s32[windows, 2], from and to; the caches. Results: the caches, in place.
    """

    def program(scribe: HloScribe) -> list[Tensor]:
        parameters = hlo.Parameters()
        pairs = parameters.add(dtype_named("s32")[len(layout.windows), 2], "pages")
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
    copied: Tensor = put_rows(cache, page, target * heads)
    return copied


def keys_of(tokens: int, rows: int, pages: int, guesses: int = 0, hidden: bool = False) -> list[TokensKey]:
    """List the programs for steps of up to `tokens` tokens and `rows` sequences of `pages` pages.

    Up to `rows` tokens, and their `guesses`, each may sample. Longer steps sample after none, a few, or as many. With
    `hidden`, there are also programs for steps whose hidden states are read.
    """
    sequences, most = powers(rows)[-1], powers(min(rows * (1 + guesses), tokens))[-1]
    longer = powers(tokens)
    longer = sorted({*longer, *(3 * size // 4 for size in longer if size >= 128)})  # less padding where tokens cost
    some = sorted({0, min(FEW, most), most})
    made = [
        TokensKey(size, min(size, sequences), samples, pages, most)
        for size in longer
        for samples in ([size] if size <= most else some)
    ]
    even = powers(tokens) if hidden else []  # fewer sizes, so that there are fewer programs
    largest = (key for key in made if key.tokens in even and key.samples == min(key.tokens, most))
    return made + [replace(key, hidden=True) for key in largest if not key.rounds]


def call_keys(sizes: Sequence[int], rows: int, pages: int) -> list[TokensKey]:
    """List fewer programs than `keys_of`, for calls that read the tokens of a step before the next one starts.

    Up to `rows` tokens each sample; so many sample in longer steps, which have these `sizes`.
    """
    longer = [TokensKey(size, rows, rows, pages, 0) for size in sizes if size > rows]
    return [TokensKey(size, size, size, pages, 0) for size in _up_to(rows)] + longer


def verify_keys(guesses: int, rows: int, pages: int) -> list[TokensKey]:
    """List the programs for steps in which up to `rows` sequences verify so many draft tokens each."""
    return [TokensKey(size, min(size, rows), size, pages, 0) for size in _up_to(rows * (1 + guesses))]


def _up_to(most: int) -> list[int]:
    """Return 1, 4, 16, … below `most`, and that."""
    return [*(1 << power for power in range(0, (most - 1).bit_length(), 2)), most]


def logits_keys(tokens: int, rows: int, pages: int, every: bool) -> list[LogitsKey]:
    """List the programs that return logits, for the steps of `keys_of`: with `every`, those of all tokens, otherwise of
    one token of each sequence.
    """
    found = (key for key in keys_of(tokens, rows, pages) if key.samples)
    sizes = ((key.tokens, key.sequences, key.pages, key.tokens if every else key.samples) for key in found)
    return [LogitsKey(*each) for each in dict.fromkeys(sizes)]


def all_logits(key: TokensKey) -> LogitsKey:
    """Return the key of the step of the same tokens that returns the logits of all."""
    return LogitsKey(key.tokens, key.sequences, key.pages, key.tokens)


def powers(most: int) -> list[int]:
    """Return 1, 2, 4, … up to the first that is at least `most`."""
    return [1 << power for power in range((most - 1).bit_length() + 1)]


def step_module(programs: Programs, key: TokensKey) -> HloModuleProto:
    """Write the program of a step.

    Parameters: a row of `TOKEN` for each token, a `sequence_row` for each sequence and a row of `SAMPLED` for each that
    samples, joined; the tokens that the step before chose, s32[chosen]; if some sample, the tokens that each one's
    sequence has, pred[samples, vocab], where those that the step computes may be missing; the caches; the weights;
    the adapters; and what is placed in the step, if there is a tower.

    Results: the last token of each sample, and NOTHING after them, up to s32[chosen]; if there are `rounds`, all
    tokens, s32[samples, ROUNDS], and NOTHING where there are fewer; if some sample, logits f32[samples, 1, vocab] of
    the last round, and the tokens that sequences have, in place; with `hidden`, the hidden states [tokens, 1, h]; with
    `features`, those of all tokens [tokens, 1, ·]; the caches, in place.
    """

    def program(scribe: HloScribe) -> list[Tensor]:
        writer = StepWriter(scribe, programs, key, (SAMPLED, key.samples), key.chosen)
        ids, position, end, row = (field(writer.tokens, TOKEN, name) for name in ("id", "position", "end", "chosen"))
        if key.chosen:
            ids = hlo.select(row >= 0, hlo.maximum(hlo.take(writer.before, hlo.maximum(row, 0)), 0), ids)
        if key.rounds:
            return writer.rounds(ids, position, end, key.chosen)
        rows = field(writer.wanted, SAMPLED, "token")
        wanted = rows if key.samples and not key.hidden else None
        x, after = writer.computed(ids, position, end, writer.sequences, writer.caches, wanted)
        made, hidden = [hlo.full(NOTHING, "s32", [key.chosen])], [x] * key.hidden + writer.features
        if key.samples:
            last = hlo.take(ids, rows)
            tokens, logits, seen = writer.sampled(hlo.take(x, rows) if key.hidden else x, last, writer.seen)
            made = [padded(tokens, key.chosen), logits, *in_place([seen], [writer.seen])]
        return [*made, *hidden, *in_place(flattened(after), flattened(writer.caches))]

    return compile_py_func(program)


def logits_module(programs: Programs, key: LogitsKey) -> HloModuleProto:
    """Write the program of a step that returns logits.

    Parameters: a row of `TOKEN` for each token, whose `chosen` is not read, a `sequence_row` for each sequence and a
    row of `LOGITS` for each wanted token, joined; the caches; the weights. Results: logits f32[logits, 1, vocab]; the
    caches, in place.
    """

    def program(scribe: HloScribe) -> list[Tensor]:
        writer = StepWriter(scribe, programs, key, (LOGITS, key.logits))
        ids, position, end = (field(writer.tokens, TOKEN, name) for name in ("id", "position", "end"))
        wanted = field(writer.wanted, LOGITS, "token")
        x, after = writer.computed(ids, position, end, writer.sequences, writer.caches, wanted)
        logits = programs.logits(scribe, writer.shared, x)
        return [logits, *in_place(flattened(after), flattened(writer.caches))]

    return compile_py_func(program)


def layer_module(programs: Programs, key: LayerKey, segment: Segment) -> HloModuleProto:
    """Write a part of a step of one sequence that returns the hidden states after it.

    Parameters: a row of `TOKEN` for each token, whose `chosen` is not read, and a `sequence_row`, joined; the hidden
    states [tokens, 1, h], unless the part embeds; the caches of its layers; its weights. Results: the hidden states, or
    with the head, logits f32[tokens, 1, vocab]; the caches, in place.
    """

    def program(scribe: HloScribe) -> list[Tensor]:
        parameters, layout = hlo.Parameters(), programs.cache
        sequence = sequence_row(layout, key.pages)
        tokens, sequences = declare_joined(parameters, "step", (TOKEN, key.tokens), (sequence, 1))
        x = None if segment.embed else programs.declare_hidden(parameters, key.tokens, 1)
        before = layout.declare(parameters, segment.layers)
        shared, layers = programs.declare_weights(parameters, segment)
        ids, position, end = (field(tokens, TOKEN, name) for name in ("id", "position", "end"))
        step = Step(hlo.reshape(ids, -1, 1), position, hlo.full(1, "s32", ids.sizes), end, None, 0)
        segments = segments_of(layout, sequences)
        x, after = programs.body(scribe, segment, shared, layers, x, before, step, segments)
        result = programs.logits(scribe, shared, x) if segment.head else x
        return [result, *in_place(flattened(after), flattened(before))]

    return compile_py_func(program)


def smallest(keys: Sequence[TokensKey], tokens: int, samples: int, hidden: bool = False) -> TokensKey:
    """Return the key of the smallest step for this many tokens, where so many sample; maybe with hidden states."""
    fits = (key for key in keys if key.tokens >= tokens and key.samples >= samples and key.hidden == hidden)
    return min(fits, key=lambda key: (key.tokens, key.samples))
