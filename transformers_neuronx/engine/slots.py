"""A model whose sequences are in slots of its cache: each has room for the longest one, and steps take rectangles.

A rectangle has a row for a slot, and the same number of active tokens in each. Rows of any number of tokens are fed in
several of them.
"""

from __future__ import annotations

import numpy as np

from transformers_neuronx.config import CompileOptions
from transformers_neuronx.engine.decoder import Array, Decoder, gap
from transformers_neuronx.engine.encoding import RedirectKey
from transformers_neuronx.engine.family import DecoderConfig, Family
from transformers_neuronx.engine.feeding import StepInputs, operands, windows
from transformers_neuronx.engine.images import continued
from transformers_neuronx.engine.inputs import Rows
from transformers_neuronx.engine.keys import ProgramKey
from transformers_neuronx.engine.kv_cache import Given
from transformers_neuronx.engine.rectangles import (
    HeadKey,
    LayerwiseKey,
    LoopKey,
    ReorderKey,
    SampleKey,
    StepKey,
    VerifyKey,
)
from transformers_neuronx.engine.store import Built
from transformers_neuronx.layers.rows import words
from transformers_neuronx.layers.sampling import BROKEN, NOTHING
from transformers_neuronx.layers.step import step_row
from transformers_neuronx.runtimes.base import DeviceTensor, Runtime


def packed_step(fed: StepInputs) -> Array:
    """Return a step as its program gets it: rows of `step_row`, as s32[b, columns]."""
    rows = np.zeros(len(fed.ids), step_row(fed.ids.shape[1]))
    for name, value in zip(("ids", "start", "length", "end", "slot"), fed, strict=False):
        rows[name] = value
    return words(rows)


class SlotDecoder(Decoder):
    """A family's graph and one checkpoint's weights on a runtime, with sequences in slots."""

    def __init__(self, family: Family, config: DecoderConfig, runtime: Runtime, options: CompileOptions) -> None:
        super().__init__(family, config, runtime, options)
        self.tainted = np.zeros(self.slots, bool)  # slots whose caches may hold NaN
        self.filled = np.zeros(self.slots, np.int64)  # number of positions written in each slot

    def planned(self) -> list[ProgramKey]:
        """Return the keys of the programs that calls need: prefill in each context bucket, logits of all prompt tokens,
        single-token steps, the token loop, sampling, reordering of slots (beams, prompts that serve several rows), and
        the encoder for each source size, if there is one.
        """
        prompts, context, widths = self.options.prompt_batch_size, self.options.buckets.context, self.programs.widths
        steps = [StepKey(prompts, n, width) for n in context for width in widths(n)]
        tokens = [StepKey(self.slots, 1, width) for width in widths(1)]
        loops = [LoopKey(width, self.options.chunk) for width in widths(1)] if self.loops else []
        sampling = [SampleKey(rows) for rows in sorted({prompts if context else self.slots, self.slots})]
        heads = [HeadKey(prompts, n) for n in context]
        moves = [ReorderKey(), *[RedirectKey()] * bool(self.memory.layout)]
        return [*self.memory.keys(), *self.tower.keys(), *steps, *heads, *tokens, *loops, *sampling, *moves]

    def verifying(self, guesses: int) -> list[ProgramKey]:
        return [VerifyKey(1 + guesses, width) for width in self.programs.widths(1) if width > guesses]

    def given(self, slot: int, start: int, end: int) -> Given:
        """Return a table of one page: a slot is one."""
        return Given([[slot + 1]], [])

    def leave(self, slot: int, end: int) -> None:
        """Do nothing: what was fed was noted."""

    def reset(self) -> None:
        """Forget all sequences: fill the caches with zeros."""
        super().reset()
        self.tainted[:], self.filled[:] = False, 0

    def feed(self, rows: Rows, all_positions: bool = False) -> Array:
        lengths = np.array([len(row) for row in rows.tokens])
        logits = np.zeros((len(lengths), lengths.max() if all_positions else 1, self.config.vocab_size), np.float32)
        for window in windows(rows, self.options):
            out = self.run(operands(window, rows, self.slots), all_positions)
            for row, lane, fed, count in zip(window.rows, window.lanes, window.fed, window.now, strict=True):
                if all_positions:
                    logits[row, fed : fed + count] = out[lane, :count]
                elif count and fed + count == lengths[row]:
                    logits[row] = out[lane]
        return logits

    def sample_after(self, rows: Rows, policy: Array, repeats: int = 1) -> Array:
        lengths = np.array([len(row) for row in rows.tokens])
        tokens = np.full((repeats, len(lengths)), NOTHING)
        policy = policy.reshape(repeats, len(lengths), -1)
        for window in windows(rows, self.options):
            fed = operands(window, rows, self.slots)
            logits = self.step(fed)
            ended = (window.now > 0) & (window.fed + window.now == lengths[window.rows])
            members, lanes = window.rows[ended], window.lanes[ended]
            for copy in range(repeats) if members.size else ():
                slots, rules = np.full(window.size, NOTHING), np.zeros((window.size, policy.shape[2]), np.int32)
                slots[lanes], rules[lanes] = rows.slots[members] + copy * len(lengths), policy[copy, members]
                tokens[copy, members] = self.sample(logits, slots, fed.end, rules)[lanes]
        self.repeat(len(lengths), repeats)
        return tokens.reshape(-1)

    def run(self, fed: StepInputs, all_positions: bool = False) -> Array:
        """Run a `step`, and return its logits on the host."""
        made = self.step(fed, all_positions)
        with self.guarded():  # an error in a program is raised when its result is read
            logits = made.numpy()
        self.tainted[fed.slots[(fed.length > 0) & ~np.isfinite(logits).all((1, 2))]] = True
        return logits

    def step(self, fed: StepInputs, all_positions: bool = False) -> DeviceTensor:
        """Feed tokens. Return logits after each row's last token, or after all: f32[b, 1 or n, vocab].

        Raises InputError for tokens that do not directly follow those in their slot.
        """
        rows, active = fed.ids.shape
        self._wipe(fed.slots[(fed.start == 0) & (fed.length > 0)])
        self.fill(fed.slots, fed.start, fed.length)
        parts = self.store.parts(
            StepKey(rows, active, self.programs.width(active, int((fed.start + fed.length).max())))
        )
        packed = packed_step(fed)
        with self.guarded():
            placed = self._placed(fed)
            if not all_positions or active == 1:
                return self.execute(parts, self.runtime.put([packed]), placed=placed)[0]
            whole = len(parts) == 1
            hidden = self.execute(parts if whole else parts[:-1], self.runtime.put([packed]), placed=placed)[-1]
        [(_, head)] = self.store.parts(HeadKey(rows, active))
        return head(hidden, *self.operands(range(0)))[0]

    def _placed(self, fed: StepInputs) -> list[DeviceTensor]:
        """Return the operands of what is placed in a step, if there is a tower."""
        if not self.family.images:
            return []
        (b, n), parts = fed.ids.shape, []
        for lane, (slot, start, count) in enumerate(zip(fed.slots, fed.start, fed.length, strict=True)):
            if count:
                found = self.pictured(slot, start, fed.prompts[lane] if fed.prompts else None)
                parts.append((lane * n, int(start), int(count), found))
        return self.tower.put(b, n, self.tower.placed(b, n, parts))

    def _turned(self, n: int) -> list[DeviceTensor]:
        """Return the same operands where slots continue sequences with `n` tokens each."""
        if not self.family.images:
            return []
        parts = [(slot * n, 0, n, continued(int(later))) for slot, later in enumerate(self.later)]
        return self.tower.put(self.slots, n, self.tower.placed(self.slots, n, parts))

    def fill(self, slots: Array, start: Array, length: Array) -> None:
        """Record what is written to the slots.

        Raises InputError for a gap before it, which attention would read, and for a slot without a source if there is
        an encoder.
        """
        fed = length > 0
        slots, start, end = slots[fed], start[fed], (start + length)[fed]
        self.memory.check(slots)
        apart = np.flatnonzero(start > self.filled[slots])
        if apart.size:
            slot = int(slots[apart[0]])
            raise gap(slot, int(start[apart[0]]), int(self.filled[slot]))
        self.filled[slots] = end
        self.version += 1

    def loop(self, rows: Array, steps: int) -> Array:
        """Generate at most `steps` tokens per row in one dispatch; stop when all rows are done. -> s32[slots, ·]

        rows [slots] are of `LOOP`. The decoder must have `loops`.
        """
        rows, width = self.capped(rows, min(steps, self.options.chunk))
        parts = self.store.parts(LoopKey(width, self.options.chunk))
        self.fill(np.arange(self.slots), rows["position"], rows["left"])
        with self.guarded():
            operands = self.runtime.put([words(rows)]), *self.seen_now()
            tokens, *self.seen = self.execute(parts, *operands, placed=self._turned(1))
            return self.noted(tokens.numpy())[:, :steps]

    def capped(self, rows: Array, steps: int) -> tuple[Array, int]:
        """Limit the `rows` of a loop to `steps` tokens each. Return them and the width that the loop needs."""
        capped = rows.copy()
        capped["left"] = np.minimum(rows["left"], steps)
        active = capped[capped["left"] > 0]
        return capped, self.programs.width(1, int((active["position"] + active["left"]).max()))

    def noted(self, tokens: Array) -> Array:
        """Mark slots with a BROKEN token as tainted. Return the sampled tokens, s32[slots, n], unchanged."""
        self.tainted |= (tokens == BROKEN).any(1)
        return tokens

    def verify(self, ids: Array, start: Array, length: Array, policy: Array) -> Array:
        """Feed as `step` does, one row per slot, and sample after each token. -> s32[slots, n]

        policy s32[slots, POLICY_COLUMNS], as in `Programs.verify`. The sampled tokens are not recorded as seen.
        """
        active, end = ids.shape[1], start + length
        parts = self.store.parts(VerifyKey(active, self.programs.width(1, max(active, int(end.max())))))
        self.fill(np.arange(self.slots), start, length)
        packed = packed_step(StepInputs(ids, start, length, end, np.arange(self.slots)))
        with self.guarded():
            operands = (self.runtime.put([operand]) for operand in (packed, policy))
            results = self.execute(parts, *operands, *self.seen_now(), placed=self._turned(active))
            return self.noted(results[0].numpy())

    def sample(self, logits: DeviceTensor, slots: Array, position: Array, policy: Array) -> Array:
        sampled = super().sample(logits, slots, position, policy)
        self.tainted[slots[sampled == BROKEN]] = True
        return sampled

    def layerwise(self, ids: Array, start: int, end: int) -> tuple[Built, Array]:
        count, active = len(ids), 1 if len(ids) == 1 else self.options.buckets.active(len(ids))
        padded = np.pad(ids, (0, active - count))[None]
        self.fill(*np.array([[0], [start], [count]]))
        parts = self.store.parts(LayerwiseKey(1, active, self.programs.width(active, start + count)))
        return parts, packed_step(StepInputs(padded, *np.array([[start], [count], [end], [0]])))

    def reorder(self, source: Array) -> None:
        [(_, program)] = self.store.parts(ReorderKey())
        with self.guarded():
            self.caches = program(self.runtime.put([source.astype(np.int32)]), *self.caches)
        self.redirect(np.where(source < 0, np.arange(self.slots), source))  # a cleared slot keeps its source
        self.version += 1
        self.tainted, self.filled = self.tainted[source] & (source >= 0), self.filled[source] * (source >= 0)
        self.later = self.later[source] * (source >= 0)

    def _wipe(self, slots: Array) -> None:
        """Clear these slots if one may hold NaN: attention weighs stale positions with zero, and 0 × NaN is NaN."""
        if self.tainted[slots].any():
            source = np.arange(self.slots)
            source[slots] = -1
            self.reorder(source)
