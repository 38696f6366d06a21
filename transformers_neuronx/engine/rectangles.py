"""The programs of sequences in slots: steps in rectangles for each bucket, the token loop, sampling, reordering.

A rectangle has a row for a slot, and as many active tokens in each. Sampling and logits of all tokens serve steps over
pages, too. This file does not run anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from transformers_neuronx import hlo
from transformers_neuronx.compiler import compile_py_func
from transformers_neuronx.config import CompileOptions
from transformers_neuronx.engine.keys import ProgramKey, Segment
from transformers_neuronx.engine.kv_cache import flattened, in_place
from transformers_neuronx.engine.loops import (
    LOOP,
    SAMPLE,
    advance,
    looped,
    rules_of,
    sampled_after,
    side_by_side,
    state_of,
    with_tokens,
)
from transformers_neuronx.engine.programs import Programs
from transformers_neuronx.layers.rows import declare_rows, field
from transformers_neuronx.layers.sampling import NOTHING, POLICY_COLUMNS, sample
from transformers_neuronx.layers.step import Placed, Step, declare_step
from transformers_neuronx.pyhlo import HloModuleProto, HloScribe, Tensor, dtype_named


@dataclass(frozen=True)
class StepKey(ProgramKey):
    """A step, which returns logits of each row's last token: rows, active tokens per row, positions to attend to."""

    kind = "step"
    divides = True
    rows: int
    active: int
    width: int

    def written(self, programs: Programs, segment: Segment) -> HloModuleProto:
        return step_module(programs, self, segment)

    def layers_each(self, options: CompileOptions) -> int | None:
        return options.unroll if self.active == 1 else options.context_unroll


@dataclass(frozen=True)
class LayerwiseKey(StepKey):
    """A step with one program per layer."""

    kind = "layerwise"
    layerwise = True


@dataclass(frozen=True)
class HeadKey(ProgramKey):
    """Logits of all tokens of a step, from the hidden states that the step returned: rows, active tokens per row."""

    kind = "head"
    rows: int
    active: int

    def written(self, programs: Programs, segment: Segment) -> HloModuleProto:
        return head_module(programs, self)

    def segments(self, programs: Programs) -> list[Segment]:
        return [Segment(False, (), True)]


@dataclass(frozen=True)
class LoopKey(ProgramKey):
    """A loop over tokens on the device: positions to attend to, and the most tokens it generates."""

    kind = "loop"
    width: int
    steps: int

    def written(self, programs: Programs, segment: Segment) -> HloModuleProto:
        return loop_module(programs, self)


@dataclass(frozen=True)
class VerifyKey(ProgramKey):
    """A step that samples after each of its tokens: active tokens, positions to attend to."""

    kind = "verify"
    active: int
    width: int

    def written(self, programs: Programs, segment: Segment) -> HloModuleProto:
        return verify_module(programs, self)


@dataclass(frozen=True)
class SampleKey(ProgramKey):
    """Sampling alone, from the logits of this many rows."""

    kind = "sample"
    rows: int

    def written(self, programs: Programs, segment: Segment) -> HloModuleProto:
        return sample_module(programs, self.rows)


@dataclass(frozen=True)
class ReorderKey(ProgramKey):
    """Moving caches between slots."""

    kind = "reorder"

    def written(self, programs: Programs, segment: Segment) -> HloModuleProto:
        return reorder_module(programs)


def step_module(programs: Programs, key: StepKey, segment: Segment) -> HloModuleProto:
    """Write the program of `segment` for `key`.

    Parameters: the step; the hidden state, unless the segment embeds; the caches of its layers; its weights in
    table order; if there is a tower, what is placed in the step, unless it is layerwise. Results: logits
    f32[rows, 1, vocab] if there is a head (layerwise: [rows, active, vocab]); the hidden state [rows, active, h],
    unless there is a head and either one active token or no layer; the caches, in place.
    """

    def program(scribe: HloScribe) -> list[Tensor]:
        parameters = hlo.Parameters()
        own_slots = key.rows != programs.slots
        step = declare_step(parameters, key.rows, key.active, key.width, own_slots)
        x = None if segment.embed else programs.declare_hidden(parameters, key.rows, key.active)
        caches = programs.cache.declare(parameters, segment.layers)
        shared, layers = programs.declare_weights(parameters, segment)
        if not isinstance(key, LayerwiseKey):
            step = replace(step, placed=programs.declare_placed(parameters, key.rows, key.active))
        x, after = programs.body(scribe, segment, shared, layers, x, caches, step)
        hidden = [] if segment.head and (key.active == 1 or not segment.layers) else [x]
        last = None if isinstance(key, LayerwiseKey) else step
        logits = [programs.logits(scribe, shared, x, last)] if segment.head else []
        return [*logits, *hidden, *in_place(flattened(after), flattened(caches))]

    return compile_py_func(program)


def head_module(programs: Programs, key: HeadKey) -> HloModuleProto:
    """Write the program that computes the logits of all tokens of a step.

    Parameters: the hidden state [rows, active, h]; the weights outside layers. Result: f32[rows, active, vocab].
    """

    def program(scribe: HloScribe) -> Tensor:
        parameters = hlo.Parameters()
        x = programs.declare_hidden(parameters, key.rows, key.active)
        shared, _ = programs.declare_weights(parameters, Segment(False, (), True))
        return programs.logits(scribe, shared, x)

    return compile_py_func(program)


def loop_module(programs: Programs, key: LoopKey) -> HloModuleProto:
    """Write the program that generates up to `steps` tokens per slot, and stops when all rows are done.

    Parameters: the rows, `LOOP` for each slot; seen pred[slots, vocab]; the caches; the weights; if there is a tower,
    what is placed in a step of one token of each slot. Results:
    tokens s32[slots, steps], NOTHING where a row has none; seen with these tokens, and the caches, in place.
    """

    def program(scribe: HloScribe) -> list[Tensor]:
        parameters = hlo.Parameters()
        packed = declare_rows(parameters, LOOP, programs.slots, "rows")
        seen = programs.declare_seen(parameters)
        caches = programs.cache.declare(parameters, programs.layers)
        weights = programs.declare_weights(parameters, programs.whole)
        placed = programs.declare_placed(parameters, programs.slots, 1)
        tokens = hlo.full(NOTHING, "s32", [programs.slots, key.steps])
        state = [hlo.constant(0, "s32"), *state_of(packed), seen, tokens]
        (*_, seen_after, tokens), after = looped(
            lambda i, token, position, wanted, *_: hlo.logical_and(i < key.steps, hlo.any(wanted > 0, 0)),
            _next_tokens(programs, scribe, weights, packed, key.width, placed),
            state,
            caches,
            programs.visible(caches, key.width),
        )
        return [tokens, *in_place([seen_after], [seen]), *after]

    return compile_py_func(program)


def _next_tokens(
    programs: Programs, scribe: HloScribe, weights: tuple[Any, list[Any]], packed: Tensor, width: int,
    placed: Placed | None,
) -> Callable[..., list[Tensor]]:  # fmt: skip
    """Return the body of the loop: feed each row's token, sample the next."""
    policy, eos = rules_of(packed)

    def body(
        i: Tensor, token: Tensor, position: Tensor, wanted: Tensor, seen: Tensor, tokens: Tensor, *flat: Tensor
    ) -> list[Tensor]:
        count = hlo.convert(wanted > 0, "s32")
        step = Step(hlo.reshape(token, -1, 1), position, count, position + count, None, width, placed=placed)
        caches = programs.cache.by_layer(flat)
        x, after = programs.body(scribe, programs.whole, *weights, None, caches, step)
        logits = hlo.reshape(programs.logits(scribe, weights[0], x), programs.slots, programs.config.vocab_size)
        sampled = sample(logits, seen, policy, position + count)
        sampled, token, wanted, tokens = advance(sampled, token, wanted, eos, i, tokens)
        return [i + 1, token, position + count, wanted, with_tokens(seen, sampled), tokens, *flattened(after)]

    return body


def verify_module(programs: Programs, key: VerifyKey) -> HloModuleProto:
    """Write the program that samples after each of several tokens, as the loop would after generating them.

    Parameters: the step, a `step_row` for each slot; s32[slots, POLICY_COLUMNS]; seen pred[slots, vocab], with only
    the first of the step's tokens; the caches; the weights; what is placed in the step, if there is a tower. Results:
    tokens s32[slots, active]; caches, in place.
    """

    def program(scribe: HloScribe) -> list[Tensor]:
        parameters = hlo.Parameters()
        step = declare_step(parameters, programs.slots, key.active, key.width, own_slots=False)
        policy = parameters.add(dtype_named("s32")[programs.slots, POLICY_COLUMNS], "policy")
        seen = programs.declare_seen(parameters)
        caches = programs.cache.declare(parameters, programs.layers)
        weights = programs.declare_weights(parameters, programs.whole)
        step = replace(step, placed=programs.declare_placed(parameters, programs.slots, key.active))
        x, after = programs.body(scribe, programs.whole, *weights, None, caches, step)
        tokens = sampled_after(programs.logits(scribe, weights[0], x), step, seen, policy)
        return [side_by_side(tokens), *in_place(flattened(after), flattened(caches))]

    return compile_py_func(program)


def sample_module(programs: Programs, rows: int) -> HloModuleProto:
    """Write the program that samples tokens from the logits that a step has left on the devices.

    Parameters: logits f32[rows, 1, vocab]; seen pred[slots, vocab]; a row of `SAMPLE` for each. One with slot -1
    samples nothing. Results: tokens s32[rows]; seen with these tokens, in place.
    """
    vocab = programs.config.vocab_size

    def program(scribe: HloScribe) -> list[Tensor]:
        parameters = hlo.Parameters()
        logits = hlo.reshape(parameters.add(dtype_named("f32")[rows, 1, vocab], "logits"), rows, vocab)
        seen = programs.declare_seen(parameters)
        packed = declare_rows(parameters, SAMPLE, rows, "rows")
        slots, position = (field(packed, SAMPLE, name) for name in ("slot", "position"))
        policy = field(packed, SAMPLE, "policy")
        named = hlo.maximum(slots, 0)
        own = seen if rows == programs.slots else hlo.take(seen, named)
        tokens = hlo.select(slots >= 0, sample(logits, own, policy, position), NOTHING)
        after = with_tokens(seen, tokens, None if rows == programs.slots else named)
        return [tokens, *in_place([after], [seen])]

    return compile_py_func(program)


def reorder_module(programs: Programs) -> HloModuleProto:
    """Write the program that gives each slot the cache of its source slot, or zeros if that is negative.

    Parameters: s32[slots], the caches. Results: the caches, in place.
    """

    def reorder(scribe: HloScribe) -> list[Tensor]:
        parameters = hlo.Parameters()
        source = parameters.add(dtype_named("s32")[programs.slots], "source")
        caches = flattened(programs.cache.declare(parameters, programs.layers))
        outputs = []
        for cache in caches:
            by_slot = hlo.take(hlo.reshape(cache, programs.slots, -1, *cache.sizes[1:]), source)
            by_slot = hlo.select(hlo.reshape(source >= 0, -1, *(1 for _ in cache.sizes)), by_slot, 0)
            outputs.append(hlo.reshape(by_slot, *cache.sizes))
        return in_place(outputs, caches)

    return compile_py_func(reorder)
