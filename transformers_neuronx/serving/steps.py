"""Programs of a step of single tokens over a cache in pages. One program computes prompts' chunks and running rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers_neuronx import hlo
from transformers_neuronx.compiler import compile_py_func
from transformers_neuronx.engine.keys import ProgramKey, Segment
from transformers_neuronx.engine.kv_cache import CacheLayout, flattened, in_place
from transformers_neuronx.engine.loops import EOS_COLUMNS, ends, looped
from transformers_neuronx.engine.programs import Programs
from transformers_neuronx.layers.rows import Row, columns, declare_joined, field, row_of
from transformers_neuronx.layers.sampling import NOTHING, POLICY_COLUMNS, sample
from transformers_neuronx.layers.step import SEGMENT, Cache, Step, located
from transformers_neuronx.layers.storage import put_rows
from transformers_neuronx.pyhlo import HloModuleProto, HloScribe, Tensor, dtype_named

# A token: its id, its position, the length of its sequence when it was first known, its row among those that the step
# before chose, if only the devices know it, otherwise -1; and the place of its sequence's adapter, or -1.
TOKEN = row_of(id=None, position=None, end=None, chosen=None, adapter=None)
# A sample: after which token, the position of the token that is sampled, how, the number of tokens to generate, each
# after the one before, and which end that, with -1 where there are fewer.
SAMPLED = row_of(token=None, position=None, policy=POLICY_COLUMNS, left=None, eos=EOS_COLUMNS)
LOGITS = row_of(token=None)  # after which token logits are wanted
ROUNDS = 32  # most tokens that a step generates of a sequence
FEW = 8  # rows


@dataclass(frozen=True)
class TokensKey(ProgramKey):
    """A step of single tokens: tokens, sequences that they may be of, tokens that sample, pages of a sequence, and
    tokens that a step may have chosen before, if it starts before they are known. With `hidden`, it returns the hidden
    states of all tokens; otherwise the last layer computes only those of tokens that sample.
    """

    kind = "step"
    tokens: int
    sequences: int
    samples: int
    pages: int
    chosen: int
    hidden: bool = False

    @property
    def name(self) -> str:
        """The key as text: `step_tokens64_sequences8_samples8`. A model's cache determines the number of pages."""
        more = f"_after{self.chosen}" * bool(self.chosen) + "_hidden" * self.hidden
        return f"step_tokens{self.tokens}_sequences{self.sequences}_samples{self.samples}{more}"

    @property
    def rounds(self) -> bool:
        """Whether it can generate several tokens of each sequence."""
        return self.samples == self.tokens == self.sequences

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


def sequence_row(layout: CacheLayout, pages: int) -> Row:
    """Return the row of a sequence: `SEGMENT`, a table of so many pages for each of the layout's windows, and if it has
    more than pages, the place where that is, and the one where its states will be.
    """
    sizes = dict(pages=len(layout.windows) * pages) | (dict(places=2) if layout.has_places else {})
    return row_of(**dict.fromkeys(SEGMENT.names or ()), **sizes)


def segments_of(layout: CacheLayout, packed: Tensor) -> dict[int | None, Tensor]:
    """Return the segments of `Step` for layers with each window, given a `sequence_row` for each sequence."""
    own, windows = columns(SEGMENT), layout.windows
    if len(windows) == 1 and not layout.has_places:
        return {windows[0]: packed}
    pages = (packed.sizes[1] - own - 2 * layout.has_places) // max(len(windows), 1)
    head, segments = hlo.slice(packed, 1, 0, own), {}
    for place, window in enumerate(windows):
        table = hlo.slice(packed, 1, own + place * pages, own + (place + 1) * pages)
        segments[window] = hlo.concatenate([head, table], 1)
    return {cache.window: head for cache in layout.kinds.values()} | segments


def step_module(programs: Programs, key: TokensKey) -> HloModuleProto:
    """Write the program of a step.

    Parameters: a row of `TOKEN` for each token, a `sequence_row` for each sequence and a row of `SAMPLED` for each that
    samples, joined; the tokens that the step before chose, s32[chosen]; if some sample, the tokens that each one's
    sequence has, pred[samples, vocab], where those that the step computes may be missing; the caches; the weights;
    the adapters; and what is placed in the step, if there is a tower.

    Results: the last token of each sample, and NOTHING after them, up to s32[chosen]; if there are `rounds`, all
    tokens, s32[samples, ROUNDS], and NOTHING where there are fewer; if some sample, logits f32[samples, 1, vocab] of
    the last round, and the tokens that sequences have, in place; with `hidden`, the hidden states [tokens, 1, h]; the
    caches, in place.
    """

    def program(scribe: HloScribe) -> list[Tensor]:
        writer = _Writer(scribe, programs, key, (SAMPLED, key.samples), key.chosen)
        ids, position, end, row = (field(writer.tokens, TOKEN, name) for name in ("id", "position", "end", "chosen"))
        if key.chosen:
            ids = hlo.select(row >= 0, hlo.maximum(hlo.take(writer.before, hlo.maximum(row, 0)), 0), ids)
        if key.rounds:
            return writer.rounds(ids, position, end, key.chosen)
        rows = field(writer.wanted, SAMPLED, "token")
        wanted = rows if key.samples and not key.hidden else None
        x, after = writer.computed(ids, position, end, writer.sequences, writer.caches, wanted)
        made, hidden = [hlo.full(NOTHING, "s32", [key.chosen])], [x] * key.hidden
        if key.samples:
            tokens, logits, seen = writer.sampled(hlo.take(x, rows) if key.hidden else x, ids, writer.seen)
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
        writer = _Writer(scribe, programs, key, (LOGITS, key.logits))
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


class _Writer:
    """Writes one step: its parameters, and what is computed of them. What is `wanted` has rows of a type, so many."""

    def __init__(
        self, scribe: HloScribe, programs: Programs, key: TokensKey | LogitsKey,
        wanted: tuple[Row, int], chosen: int = 0,
    ) -> None:  # fmt: skip
        self.scribe, self.programs, self.layout, self.size = scribe, programs, programs.cache, key.tokens
        self.sequence = sequence_row(self.layout, key.pages)
        parameters = hlo.Parameters()
        rows = [(TOKEN, key.tokens), (self.sequence, key.sequences), wanted]
        self.tokens, self.sequences, self.wanted = declare_joined(parameters, "step", *rows)
        if chosen:
            self.before = parameters.add(dtype_named("s32")[chosen], "before")
        if isinstance(key, TokensKey) and key.samples:
            self.seen = parameters.add(dtype_named("pred")[wanted[1], programs.config.vocab_size], "seen")
        self.caches = self.layout.declare(parameters, self.layout.layers)
        self.shared, self.weights = programs.declare_weights(parameters, programs.whole)
        programs.declare_adapters(parameters, self.weights)
        self.placed = programs.declare_placed(parameters, key.tokens, 1)

    def computed(
        self, ids: Tensor, position: Tensor, end: Tensor, sequences: Tensor, caches: list[Cache],
        wanted: Tensor | None = None,
    ) -> tuple[Tensor, list[Cache]]:  # fmt: skip
        """Compute tokens. ids, position, end s32[tokens] -> hidden states [tokens, 1, h], and the caches after

        With `wanted`, s32[·], the hidden states of these tokens, [wanted, 1, h].
        """
        places = slots = None
        if self.layout.has_places:
            places = field(sequences, self.sequence, "places")
            slots = hlo.take(hlo.reshape(hlo.slice(places, 1, 0, 1), -1), located(sequences, self.size)[1])
        one = hlo.full(1, "s32", ids.sizes)
        adapters = field(self.tokens, TOKEN, "adapter") if self.programs.adapters else None
        more: dict[str, Any] = dict(places=places, adapters=adapters, placed=self.placed)
        step = Step(hlo.reshape(ids, -1, 1), position, one, end, slots, 0, **more)
        segments, programs = segments_of(self.layout, sequences), self.programs
        fewer = wanted is not None and wanted.sizes[0] < self.size
        where = None, caches, step, segments, wanted if fewer else None
        x, after = programs.body(self.scribe, programs.whole, self.shared, self.weights, *where)
        return (x if fewer or wanted is None else hlo.take(x, wanted)), after

    def sampled(self, x: Tensor, ids: Tensor, seen: Tensor, later: Tensor | int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Sample after tokens x [samples, 1, h], of ids s32[tokens], so many positions later than the rows say.

        -> s32[samples], logits f32[samples, 1, vocab], `seen` pred[samples, vocab] with these tokens
        """
        rows, position, policy = (field(self.wanted, SAMPLED, name) for name in ("token", "position", "policy"))
        count = rows.sizes[0]
        own = hlo.concatenate([hlo.iota("s32", [count, 1], 0), hlo.reshape(hlo.take(ids, rows), count, 1)], 1)
        seen = hlo.scatter_rows(seen, own, hlo.full(1, "pred", [count]), (0, 1))
        logits = self.programs.logits(self.scribe, self.shared, x)
        return sample(hlo.reshape(logits, count, -1), seen, policy, position + later), logits, seen

    def rounds(self, ids: Tensor, position: Tensor, end: Tensor, chosen: int) -> list[Tensor]:
        """Compute a step, and then, as long as rows have tokens left, what they sample, one more of each in a round.

        There is more than one round only if each token samples, and is of a sequence of its own.
        """
        count, vocab = self.size, self.programs.config.vocab_size
        rows, eos = (field(self.wanted, SAMPLED, name) for name in ("token", "eos"))

        def one(
            i: Tensor, ids: Tensor, position: Tensor, end: Tensor, left: Tensor, sequences: Tensor, tokens: Tensor,
            seen: Tensor, _: Tensor, *flat: Tensor,
        ) -> list[Tensor]:  # fmt: skip
            x, after = self.computed(ids, position, end, sequences, self.layout.by_layer(flat), rows)
            found, logits, seen = self.sampled(x, ids, seen, later=i)
            found = hlo.select(left > 0, found, NOTHING)
            tokens = hlo.dynamic_update_slice(tokens, hlo.reshape(found, -1, 1), [hlo.constant(0, "s32"), i])
            left = hlo.select(ends(found, eos), 0, left - 1)
            ids = hlo.select(found < 0, ids, found)
            return [
                *(i + 1, ids, position + 1, position + 2, left, self._moved(sequences, left), tokens, seen, logits),
                *flattened(after),
            ]

        tokens, logits = hlo.full(NOTHING, "s32", [count, ROUNDS]), hlo.full(0, "f32", [count, 1, vocab])
        left = field(self.wanted, SAMPLED, "left")
        state = [hlo.constant(0, "s32"), ids, position, end, left, self.sequences, tokens, self.seen, logits]
        (_, last, _, _, _, _, tokens, seen, logits), after = looped(
            lambda i, ids, position, end, left, *_: hlo.logical_or(hlo.equal(i, 0), hlo.any(left > 0, 0)),
            one,
            state,
            self.caches,
            self.caches,
        )
        return [padded(last, chosen), tokens, logits, *in_place([seen], [self.seen]), *after]

    def _moved(self, sequences: Tensor, left: Tensor) -> Tensor:
        """Return the rows of sequences for the next round: one token further on, and none of those that have ended."""
        first, start, of_prompt = (field(sequences, self.sequence, name) for name in ("first", "start", "of_prompt"))
        head = [first, hlo.convert(left > 0, "s32"), start + 1, of_prompt]
        rest = hlo.slice(sequences, 1, columns(SEGMENT), sequences.sizes[1])
        return hlo.concatenate([*(hlo.reshape(each, -1, 1) for each in head), rest], 1)


def padded(tokens: Tensor, size: int) -> Tensor:
    """Add NOTHING after tokens s32[·], up to `size`."""
    rest = size - tokens.sizes[0]
    return hlo.concatenate([tokens, hlo.full(NOTHING, "s32", [rest])], 0) if rest > 0 else tokens


def smallest(keys: Sequence[TokensKey], tokens: int, samples: int, hidden: bool = False) -> TokensKey:
    """Return the key of the smallest step for this many tokens, where so many sample; maybe with hidden states."""
    fits = (key for key in keys if key.tokens >= tokens and key.samples >= samples and key.hidden == hidden)
    return min(fits, key=lambda key: (key.tokens, key.samples))
