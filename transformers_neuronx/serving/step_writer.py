"""Writes a step of single tokens over a cache in pages: its parameters, and what is computed of them."""

from __future__ import annotations

from typing import Any, Protocol

from transformers_neuronx import hlo
from transformers_neuronx.engine.kv_cache import CacheLayout, flattened, in_place
from transformers_neuronx.engine.loops import EOS_COLUMNS, advance, looped, with_tokens
from transformers_neuronx.engine.programs import LAST, Programs
from transformers_neuronx.layers.rows import Row, columns, declare_joined, field, row_of
from transformers_neuronx.layers.sampling import NOTHING, POLICY_COLUMNS, sample
from transformers_neuronx.layers.step import SEGMENT, Cache, Step, located
from transformers_neuronx.pyhlo import HloScribe, Tensor, dtype_named

# A token: its id, its position, the length of its sequence when it was first known, its row among those that the step
# before chose, if only the devices know it, otherwise -1; and the place of its sequence's adapter, or -1.
TOKEN = row_of(id=None, position=None, end=None, chosen=None, adapter=None)
# A sample: after which token, the position of the token that is sampled, how, the number of tokens to generate, each
# after the one before, and which end that, with -1 where there are fewer.
SAMPLED = row_of(token=None, position=None, policy=POLICY_COLUMNS, left=None, eos=EOS_COLUMNS)
LOGITS = row_of(token=None)  # after which token logits are wanted
ROUNDS = 32  # most tokens that a step generates of a sequence


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


class Sizes(Protocol):
    """Sizes of a step: tokens, sequences that they may be of, and pages of a sequence."""

    @property
    def tokens(self) -> int: ...
    @property
    def sequences(self) -> int: ...
    @property
    def pages(self) -> int: ...


class StepWriter:
    """Writes one step: its parameters, and what is computed of them. What is `wanted` has rows of a type, so many."""

    def __init__(
        self, scribe: HloScribe, programs: Programs, key: Sizes, wanted: tuple[Row, int], chosen: int = 0,
    ) -> None:  # fmt: skip
        self.scribe, self.programs, self.layout, self.size = scribe, programs, programs.cache, key.tokens
        self.sequence = sequence_row(self.layout, key.pages)
        self.features: list[Tensor] = []  # one, once the step is computed, if the programs have some
        self.parameters = parameters = hlo.Parameters()
        rows = [(TOKEN, key.tokens), (self.sequence, key.sequences), wanted]
        self.tokens, self.sequences, self.wanted = declare_joined(parameters, "step", *rows)
        if chosen:
            self.before = parameters.add(dtype_named("s32")[chosen], "before")
        if wanted[0] == SAMPLED and wanted[1]:
            self.seen = parameters.add(dtype_named("pred")[wanted[1], programs.config.vocab_size], "seen")
        self.caches = self.layout.declare(parameters, self.layout.layers)
        self.shared, self.weights = programs.declare_weights(parameters, programs.whole)
        programs.declare_adapters(parameters, self.weights)
        self.placed = programs.declare_placed(parameters, key.tokens, 1)

    def computed(
        self, ids: Tensor, position: Tensor, end: Tensor, sequences: Tensor, caches: list[Cache],
        wanted: Tensor | None = None, features: Tensor | None = None,
    ) -> tuple[Tensor, list[Cache]]:  # fmt: skip
        """Compute tokens. ids, position, end s32[tokens] -> hidden states [tokens, 1, h], and the caches after

        With `wanted`, s32[·], the hidden states of these tokens, [wanted, 1, h]. `features` are those of `Step`.
        """
        places = slots = None
        if self.layout.has_places:
            places = field(sequences, self.sequence, "places")
            slots = hlo.take(hlo.reshape(hlo.slice(places, 1, 0, 1), -1), located(sequences, self.size)[1])
        one = hlo.full(1, "s32", ids.sizes)
        adapters = field(self.tokens, TOKEN, "adapter") if self.programs.adapters else None
        more: dict[str, Any] = dict(places=places, adapters=adapters, placed=self.placed, features=features)
        step = Step(hlo.reshape(ids, -1, 1), position, one, end, slots, 0, **more)
        segments, programs = segments_of(self.layout, sequences), self.programs
        last = LAST in programs.features
        fewer = wanted is not None and wanted.sizes[0] < self.size and not last
        where, before = (None, caches, step, segments, wanted if fewer else None), list[Tensor]()
        x, after = programs.body(self.scribe, programs.whole, self.shared, self.weights, *where, before)
        if last:
            before.append(programs.last_hidden(self.scribe, self.shared, x))
        if programs.features:
            self.features = [hlo.concatenate([before[layer] for layer in programs.features], 2)]
        return (x if fewer or wanted is None else hlo.take(x, wanted)), after

    def sampled(self, x: Tensor, ids: Tensor, seen: Tensor, later: Tensor | int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Sample after tokens x [samples, 1, h], whose ids are s32[samples], so many positions later than the rows say.

        -> s32[samples], logits f32[samples, 1, vocab], `seen` pred[samples, vocab] with these tokens
        """
        position, policy = (field(self.wanted, SAMPLED, name) for name in ("position", "policy"))
        count = ids.sizes[0]
        seen = with_tokens(seen, ids, at_once=True)
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
            found, logits, seen = self.sampled(x, hlo.take(ids, rows), seen, later=i)
            _, ids, left, tokens = advance(found, ids, left, eos, i, tokens)
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
        return of_one_token(sequences, first, left > 0, start + 1, of_prompt)


def of_one_token(sequences: Tensor, first: Tensor, real: Tensor, start: Tensor, of_prompt: Tensor) -> Tensor:
    """Return rows of sequences with one token each, if that is `real`, and none otherwise; their pages stay."""
    head = [first, hlo.convert(real, "s32"), start, of_prompt]
    rest = hlo.slice(sequences, 1, columns(SEGMENT), sequences.sizes[1])
    return hlo.concatenate([*(hlo.reshape(each, -1, 1) for each in head), rest], 1)


def padded(tokens: Tensor, size: int) -> Tensor:
    """Add NOTHING after tokens s32[·], up to `size`."""
    rest = size - tokens.sizes[0]
    return hlo.concatenate([tokens, hlo.full(NOTHING, "s32", [rest])], 0) if rest > 0 else tokens
