"""The programs of one model as HLO modules: steps for each bucket, the token loop, sampling, reordering of slots.

They are built from a family's graph and weight table. This file defines the order of parameters and results, and
which result aliases which parameter. It does not run anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from typing import Any, ClassVar, Self

from transformers_neuronx import hlo
from transformers_neuronx.compiler import compile_py_func
from transformers_neuronx.config import CompileOptions
from transformers_neuronx.engine.family import DecoderConfig, Family
from transformers_neuronx.engine.keys import (
    HeadKey,
    LayerwiseKey,
    LoopKey,
    ProgramKey,
    ReorderKey,
    SampleKey,
    Segment,
    StepKey,
    VerifyKey,
)
from transformers_neuronx.engine.kv_cache import CacheLayout, LayerCache, flattened, in_place
from transformers_neuronx.engine.loops import (
    LOOP,
    SAMPLE,
    ends,
    looped,
    rules_of,
    sampled_after,
    side_by_side,
    state_of,
    with_tokens,
)
from transformers_neuronx.layers.rows import declare_rows, field
from transformers_neuronx.layers.sampling import NOTHING, POLICY_COLUMNS, sample
from transformers_neuronx.layers.step import Cache, Step, declare_step
from transformers_neuronx.pyhlo import HloModuleProto, HloScribe, Tensor, dtype_named
from transformers_neuronx.weights.parameters import declare
from transformers_neuronx.weights.quantization import in_panels, quantized
from transformers_neuronx.weights.rows import Weight


class Programs:
    """Writes the HLO modules of a family's model for `degree` devices.

    With `panels`, matrices of linear layers are stored in panels. `attends(dtype, head_dim)` tells whether a kernel
    reads caches in place, and only the positions in use; then loops carry whole caches.
    """

    reads_sources: ClassVar[bool] = False  # whether each sequence attends to what an encoder has read

    def __init__(
        self,
        family: Family,
        config: DecoderConfig,
        options: CompileOptions,
        degree: int,
        panels: bool = False,
        attends: Callable[[str, int], bool] = lambda dtype, head_dim: False,
    ) -> None:
        self.graph = family.graph
        self.options = options
        self.config = config
        self.dtype = options.amp
        self.slots = options.batch_size
        self.positions = options.buckets.longest
        self.degree = degree
        self.layers = tuple(getattr(config, "layer_kinds", [""] * config.n_layer))
        kinds = {kind: self._cache_of(kind) for kind in dict.fromkeys(self.layers)}
        self.cache = CacheLayout(self.layers, kinds, self.reads_sources, self.slots)
        dense = options.sparse is None or options.sparse.window is not None
        kept = [(each.heads or config.attention_heads, each) for each in self.cache.kinds.values()]
        self.in_place = dense and all(not one.spread and attends(one.dtype, heads.head_dim) for heads, one in kept)
        self.reads_pages = self.in_place and family.pages
        self.panels = panels
        table = quantized(family.weights.table(config), options.quant)
        self.table = in_panels(table, self.dtype) if panels else table
        self.shared_table = [row for row in self.table if not row.layered]
        self.layer_table = [row for row in self.table if row.layered]

    def _cache_of(self, kind: str) -> LayerCache:
        """Return what layers of a kind keep. A window that no sequence is longer than is none."""
        config, options, quant = self.config, self.options, self.options.kv_cache_quant
        windows = [config.window_of(kind), options.sparse.window if options.sparse else None]
        return LayerCache(
            config.heads_of(kind),
            self.degree,
            self.slots,
            self.positions,
            quant.quant_dtype if quant else self.dtype,
            scaled=bool(quant and quant.scaled),
            by_position=options.shard_over_sequence,
            window=min((window for window in windows if window and window < self.positions), default=None),
            states=tuple(config.states_of(kind)),
            places=self.slots,
        )

    def rows_of(self, kind: str) -> list[Weight]:
        """The rows of the table that a layer of this kind has."""
        return [row for row in self.layer_table if row.has(kind)]

    def over(self, cache: CacheLayout) -> Self:
        """Return the programs for a cache of this layout."""
        others = copy(self)
        others.cache = cache
        return others

    @property
    def whole(self) -> Segment:
        return Segment(True, self.layers, True)

    def widths(self, active: int) -> tuple[int, ...]:
        """Return the numbers of positions that programs of `active` tokens attend to, ascending.

        One is enough where attention reads only the positions in use. Otherwise a single token has one per bucket.
        A prompt has the smallest that fits it, and the longest for tokens that continue a sequence.
        """
        positions = self.options.buckets.positions
        if self.in_place:
            return positions[-1:]
        return positions if active == 1 else tuple(sorted({self.options.buckets.width(active), positions[-1]}))

    def width(self, active: int, needed: int) -> int:
        """Return the smallest of these for `needed` positions, including the `active` new ones."""
        return next(width for width in self.widths(active) if width >= max(active, needed))

    def segments(self, key: ProgramKey) -> list[Segment]:
        """Split a program into parts that run in order: groups of layers between embedding and head."""
        if isinstance(key, HeadKey):
            return [Segment(False, (), True)]
        unroll = None
        if isinstance(key, StepKey):
            unroll = self.options.unroll if key.active == 1 else self.options.context_unroll
        if key.layerwise:
            unroll = 1
        elif unroll is None or unroll >= len(self.layers):
            return [self.whole]
        groups = [self.layers[first : first + unroll] for first in range(0, len(self.layers), unroll)]
        return [Segment(True, (), False), *(Segment(False, group, False) for group in groups), Segment(False, (), True)]

    def module(self, key: ProgramKey, segment: Segment) -> HloModuleProto:
        match key:
            case StepKey():
                return self.step(key, segment)
            case HeadKey():
                return self.head(key)
            case LoopKey():
                return self.loop(key)
            case VerifyKey():
                return self.verify(key)
            case SampleKey():
                return self.sample(key.rows)
            case ReorderKey():
                return self.reorder()
            case _:
                return key.written(self, segment)

    def step(self, shape: StepKey, segment: Segment) -> HloModuleProto:
        """Write the program of `segment` for `shape`.

        Parameters: the step; the hidden state, unless the segment embeds; the caches of its layers; its weights in
        table order. Results: logits f32[rows, 1, vocab] if there is a head (layerwise: [rows, active, vocab]); the
        hidden state [rows, active, h], unless there is a head and either one active token or no layer; the caches, in
        place.
        """

        def program(scribe: HloScribe) -> list[Tensor]:
            parameters = hlo.Parameters()
            own_slots = shape.rows != self.slots
            step = declare_step(parameters, shape.rows, shape.active, shape.width, own_slots)
            x = None if segment.embed else self.declare_hidden(parameters, shape.rows, shape.active)
            caches = self.cache.declare(parameters, segment.layers)
            shared, layers = self.declare_weights(parameters, segment)
            x, after = self.body(scribe, segment, shared, layers, x, caches, step)
            hidden = [] if segment.head and (shape.active == 1 or not segment.layers) else [x]
            last = None if isinstance(shape, LayerwiseKey) else step
            logits = [self.logits(scribe, shared, x, last)] if segment.head else []
            return [*logits, *hidden, *in_place(flattened(after), flattened(caches))]

        return compile_py_func(program)

    def head(self, key: HeadKey) -> HloModuleProto:
        """Write the program that computes the logits of all tokens of a step.

        Parameters: the hidden state [rows, active, h]; the weights outside layers. Result: f32[rows, active, vocab].
        """

        def program(scribe: HloScribe) -> Tensor:
            parameters = hlo.Parameters()
            x = self.declare_hidden(parameters, key.rows, key.active)
            shared, _ = self.declare_weights(parameters, Segment(False, (), True))
            return self.logits(scribe, shared, x)

        return compile_py_func(program)

    def loop(self, loop: LoopKey) -> HloModuleProto:
        """Write the program that generates up to `steps` tokens per slot, and stops when all rows are done.

        Parameters: the rows, `LOOP` for each slot; seen pred[slots, vocab]; the caches; the weights. Results:
        tokens s32[slots, steps], NOTHING where a row has none; seen with these tokens, and the caches, in place.
        """

        def program(scribe: HloScribe) -> list[Tensor]:
            parameters = hlo.Parameters()
            packed = declare_rows(parameters, LOOP, self.slots, "rows")
            seen = self.declare_seen(parameters)
            caches = self.cache.declare(parameters, self.layers)
            weights = self.declare_weights(parameters, self.whole)
            tokens = hlo.full(NOTHING, "s32", [self.slots, loop.steps])
            state = [hlo.constant(0, "s32"), *state_of(packed), seen, tokens]
            (*_, seen_after, tokens), after = looped(
                lambda i, token, position, wanted, *_: hlo.logical_and(i < loop.steps, hlo.any(wanted > 0, 0)),
                self._next_tokens(scribe, weights, packed, loop.width),
                state,
                caches,
                self.visible(caches, loop.width),
            )
            return [tokens, *in_place([seen_after], [seen]), *after]

        return compile_py_func(program)

    def _next_tokens(
        self, scribe: HloScribe, weights: tuple[Any, list[Any]], packed: Tensor, width: int
    ) -> Callable[..., list[Tensor]]:
        """Return the body of the loop: feed each row's token, sample the next."""
        policy, eos = rules_of(packed)

        def body(
            i: Tensor, token: Tensor, position: Tensor, wanted: Tensor, seen: Tensor, tokens: Tensor, *flat: Tensor
        ) -> list[Tensor]:
            active = wanted > 0
            count = hlo.convert(active, "s32")
            step = Step(hlo.reshape(token, -1, 1), position, count, position + count, None, width)
            caches = self.cache.by_layer(flat)
            x, after = self.body(scribe, self.whole, *weights, None, caches, step)
            logits = hlo.reshape(self.logits(scribe, weights[0], x), self.slots, self.config.vocab_size)
            sampled = hlo.select(active, sample(logits, seen, policy, position + count), NOTHING)
            here = [hlo.constant(0, "s32"), i]
            tokens = hlo.dynamic_update_slice(tokens, hlo.reshape(sampled, -1, 1), here)
            wanted = hlo.select(ends(sampled, eos), 0, wanted - count)
            token = hlo.select(sampled < 0, token, sampled)
            return [i + 1, token, position + count, wanted, with_tokens(seen, sampled), tokens, *flattened(after)]

        return body

    def verify(self, verify: VerifyKey) -> HloModuleProto:
        """Write the program that samples after each of several tokens, as the loop would after generating them.

        Parameters: the step, a `step_row` for each slot; s32[slots, POLICY_COLUMNS]; seen pred[slots, vocab], with only
        the first of the step's tokens; the caches; the weights. Results: tokens s32[slots, active]; caches, in place.
        """

        def program(scribe: HloScribe) -> list[Tensor]:
            parameters = hlo.Parameters()
            step = declare_step(parameters, self.slots, verify.active, verify.width, own_slots=False)
            policy = parameters.add(dtype_named("s32")[self.slots, POLICY_COLUMNS], "policy")
            seen = self.declare_seen(parameters)
            caches = self.cache.declare(parameters, self.layers)
            weights = self.declare_weights(parameters, self.whole)
            x, after = self.body(scribe, self.whole, *weights, None, caches, step)
            tokens = sampled_after(self.logits(scribe, weights[0], x), step, seen, policy)
            return [side_by_side(tokens), *in_place(flattened(after), flattened(caches))]

        return compile_py_func(program)

    def sample(self, rows: int) -> HloModuleProto:
        """Write the program that samples tokens from the logits that a step has left on the devices.

        Parameters: logits f32[rows, 1, vocab]; seen pred[slots, vocab]; a row of `SAMPLE` for each. One with slot -1
        samples nothing. Results: tokens s32[rows]; seen with these tokens, in place.
        """
        vocab = self.config.vocab_size

        def program(scribe: HloScribe) -> list[Tensor]:
            parameters = hlo.Parameters()
            logits = hlo.reshape(parameters.add(dtype_named("f32")[rows, 1, vocab], "logits"), rows, vocab)
            seen = self.declare_seen(parameters)
            packed = declare_rows(parameters, SAMPLE, rows, "rows")
            slots, position = (field(packed, SAMPLE, name) for name in ("slot", "position"))
            policy = field(packed, SAMPLE, "policy")
            named = hlo.maximum(slots, 0)
            own = seen if rows == self.slots else hlo.take(seen, named)
            tokens = hlo.select(slots >= 0, sample(logits, own, policy, position), NOTHING)
            after = with_tokens(seen, tokens, None if rows == self.slots else named)
            return [tokens, *in_place([after], [seen])]

        return compile_py_func(program)

    def reorder(self) -> HloModuleProto:
        """Write the program that gives each slot the cache of its source slot, or zeros if that is negative.

        Parameters: s32[slots], the caches. Results: the caches, in place.
        """

        def reorder(scribe: HloScribe) -> list[Tensor]:
            parameters = hlo.Parameters()
            source = parameters.add(dtype_named("s32")[self.slots], "source")
            caches = flattened(self.cache.declare(parameters, self.layers))
            outputs = []
            for cache in caches:
                by_slot = hlo.take(hlo.reshape(cache, self.slots, -1, *cache.sizes[1:]), source)
                by_slot = hlo.select(hlo.reshape(source >= 0, -1, *(1 for _ in cache.sizes)), by_slot, 0)
                outputs.append(hlo.reshape(by_slot, *cache.sizes))
            return in_place(outputs, caches)

        return compile_py_func(reorder)

    def visible(self, caches: list[Cache], width: int) -> list[Cache]:
        """Return what a loop carries of the caches to see `width` positions."""
        return caches if self.in_place else self.cache.cut(caches, width)

    def declare_seen(self, parameters: hlo.Parameters) -> Tensor:
        """Declare `seen`, the tokens that each slot's sequence has: pred[slots, vocab]. Only penalties read it."""
        return parameters.add(dtype_named("pred")[self.slots, self.config.vocab_size], "seen")

    def declare_hidden(self, parameters: hlo.Parameters, rows: int, active: int) -> Tensor:
        return parameters.add(dtype_named(self.dtype)[rows, active, self.config.hidden_size], "hidden")

    def declare_weights(self, parameters: hlo.Parameters, segment: Segment) -> tuple[Any, list[Any]]:
        """Declare the weights outside the layers if the segment needs them, and those of each of its layers."""
        tables = [self.shared_table] if segment.embed or segment.head else []
        shared = [declare(table, parameters, self.dtype, self.degree) for table in tables]
        scopes = [(self.rows_of(kind), f"layer.{layer}.") for layer, kind in enumerate(segment.layers)]
        layers = [declare(table, parameters, self.dtype, self.degree, scope) for table, scope in scopes]
        return shared[0] if shared else None, layers

    def body(
        self,
        scribe: HloScribe,
        segment: Segment,
        shared: Any,
        layers: list[Any],
        x: Tensor | None,
        caches: list[Cache],
        step: Step,
        segments: Mapping[int | None, Tensor] | None = None,
    ) -> tuple[Tensor, list[Cache]]:
        """Apply the family's graph up to its head. Return the hidden state [b, n, h] and the new caches.

        In a step of single tokens, `segments` are those of `Step` for layers with each window.
        """
        steps = self._steps_of(step, segments)
        step = next(iter(steps.values()))
        if segment.embed:
            with scribe.scope("embed"):
                x = self.graph.embed(self.config, shared, step)
        prepared = [self.graph.prepare(self.config, step)] if hasattr(self.graph, "prepare") else []
        after = []
        for number, (weights, cache, kind) in enumerate(zip(layers, caches, segment.layers, strict=True)):
            with scribe.scope(f"layer.{number}"):
                kinds = [kind] if kind else []
                x, cache = self.graph.layer(self.config, weights, x, cache, steps[kind], *prepared, *kinds)
                after.append(cache)
        assert x is not None
        return x, after

    def _steps_of(self, step: Step, segments: Mapping[int | None, Tensor] | None) -> dict[str, Step]:
        """Return the step as layers of each kind get it."""
        of_cache: dict[tuple[Any, int | None], Step] = {}
        steps = {}
        for kind, cache in self.cache.kinds.items():
            window = cache.window if segments else None
            if (cache.spread, window) not in of_cache:
                own = segments[window] if segments else step.segments
                of_cache[cache.spread, window] = replace(
                    step, pattern=self.options.sparse, spread=cache.spread, segments=own
                )
            steps[kind] = of_cache[cache.spread, window]
        return steps

    def logits(self, scribe: HloScribe, shared: Any, x: Tensor, last: Step | None = None) -> Tensor:
        """Apply the head, to each row's last token only if that step is given. x [b, n, h] -> f32[b, n or 1, vocab]"""
        with scribe.scope("head"):
            logits: Tensor = self.graph.head(self.config, shared, last.last(x) if last else x)
        return logits
