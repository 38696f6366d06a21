"""The programs of one model as modules: steps for each bucket, the loop over tokens, the choice alone, the reordering.

From a family's graph and weight table to HLO. This file owns the order of parameters and results, and which result
takes the memory of which parameter. It does not run anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

from transformers_neuronx import hlo
from transformers_neuronx.compiler import compile_py_func
from transformers_neuronx.config import CompileOptions
from transformers_neuronx.keys import (
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
from transformers_neuronx.layers.sampling import NOTHING, POLICY_COLUMNS, sample, unpacked
from transformers_neuronx.layers.step import Cache, CacheArray, Step, cache_arrays, declare_cache, declare_step
from transformers_neuronx.loops import LOOP_COLUMNS, ends, rules_of, sampled_after, side_by_side, with_tokens
from transformers_neuronx.pyhlo import HloModuleProto, HloScribe, Tensor, dtype_named
from transformers_neuronx.quantization import in_panels, quantized
from transformers_neuronx.weights import Heads, declare


class DecoderConfig(Protocol):
    """What the engine itself reads of a family's configuration."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def n_positions(self) -> int | None: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def n_layer(self) -> int: ...
    @property
    def attention_heads(self) -> Heads: ...
    @property
    def eos_token_id(self) -> int | list[int] | None: ...


@dataclass(frozen=True)
class Family:
    """A kind of decoder: how its configuration is read, and the modules with its weight table and its graph.

    `weights` has `table(config)`, `ignored(config)` and PREFIX; `graph` has `embed`, `layer` and `head`, and, where
    layers share something that follows from the positions alone, `prepare`. Where layers differ, the configuration
    has `layer_kinds`, and `layer` is told the kind as its last argument.
    """

    read_config: Callable[[Any], DecoderConfig]
    weights: ModuleType
    graph: ModuleType

    @property
    def name(self) -> str:
        """The folder's, which is the package that the graph is in; of a family in one file, that file's."""
        return self.graph.__name__.split(".")[-2:][0]


class Programs:
    """Writes the modules of a family's model for `degree` devices.

    With `panels`, matrices of linear layers lie so. Where attention reads caches `in_place`, and of them only the
    positions in use, loops carry them whole.
    """

    def __init__(
        self, family: Family, config: DecoderConfig, options: CompileOptions, degree: int, panels: bool = False
    ) -> None:
        self.graph = family.graph
        self.options = options
        self.config = config
        self.dtype = options.amp
        self.slots = options.batch_size
        self.positions = options.buckets.longest
        self.degree = degree
        self.in_place = False
        self.layers = tuple(getattr(config, "layer_kinds", [""] * config.n_layer))
        self.panels = panels
        table = quantized(family.weights.table(config), options.quant)
        self.table = in_panels(table, self.dtype) if panels else table
        self.shared_table = [row for row in self.table if not row.layered]
        self.layer_table = [row for row in self.table if row.layered]

    @property
    def cache_arrays(self) -> list[CacheArray]:
        """One device's cache of one layer."""
        heads, quant = self.config.attention_heads, self.options.kv_cache_quant
        sizes = self.slots * heads.kv_share(self.degree), self.positions, heads.head_dim
        return cache_arrays(sizes, quant.quant_dtype if quant else self.dtype, scaled=bool(quant and quant.scaled))

    def by_layer(self, flat: Sequence[Any]) -> list[tuple[Any, ...]]:
        """The arrays of the caches of several layers, layer by layer."""
        arrays = len(self.cache_arrays)
        return [tuple(flat[first : first + arrays]) for first in range(0, len(flat), arrays)]

    @property
    def whole(self) -> Segment:
        return Segment(True, self.layers, True)

    def widths(self, active: int) -> tuple[int, ...]:
        """How many positions programs of `active` tokens may look back to, ascending.

        Where attention reads only the positions in use, one program does. Elsewhere single tokens have one for each
        bucket; prompts have one for those that fit, and one for whatever goes on with a sequence.
        """
        positions = self.options.buckets.positions
        if self.in_place:
            return positions[-1:]
        return positions if active == 1 else tuple(sorted({self.options.buckets.width(active), positions[-1]}))

    def width(self, active: int, needed: int) -> int:
        """The smallest of these that takes `needed` positions, of which `active` are new."""
        return next(width for width in self.widths(active) if width >= max(active, needed))

    def segments(self, key: ProgramKey) -> list[Segment]:
        """The parts, each a program, that run one after the other: groups of layers between embedding and head."""
        if isinstance(key, HeadKey):
            return [Segment(False, (), True)]
        unroll = None
        if isinstance(key, StepKey):
            unroll = self.options.unroll if key.active == 1 else self.options.context_unroll
        if isinstance(key, LayerwiseKey):
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
                raise TypeError(f"no model of this kind has a program {key.name}")

    def step(self, shape: StepKey, segment: Segment) -> HloModuleProto:
        """The program of `segment` for `shape`.

        Parameters: the step; the hidden state, unless the segment embeds; keys and values of each of its layers; its
        weights in the order of the table. Results: with a head, logits f32[rows, 1, vocab], of a layerwise step
        [rows, active, vocab]; if it has layers, and of one token is no head, the hidden state [rows, active, h]; then
        the caches, in the memory of those that came in.
        """

        def program(scribe: HloScribe) -> list[Tensor]:
            parameters = hlo.Parameters()
            own_slots = shape.rows != self.slots
            step = declare_step(parameters, shape.rows, shape.active, shape.width, own_slots)
            x = None if segment.embed else self.declare_hidden(parameters, shape.rows, shape.active)
            caches = self.declare_caches(parameters, len(segment.layers))
            shared, layers = self.declare_weights(parameters, segment)
            x, after = self.body(scribe, segment, shared, layers, x, caches, step)
            hidden = [] if segment.head and (shape.active == 1 or not segment.layers) else [x]
            last = None if isinstance(shape, LayerwiseKey) else step
            logits = [self.logits(scribe, shared, x, last)] if segment.head else []
            return [*logits, *hidden, *in_place(flattened(after), flattened(caches))]

        return compile_py_func(program)

    def head(self, key: HeadKey) -> HloModuleProto:
        """The program that has logits of all tokens of a step.

        Parameters: the hidden state [rows, active, h]; the weights of no layer. Result: f32[rows, active, vocab].
        """

        def program(scribe: HloScribe) -> Tensor:
            parameters = hlo.Parameters()
            x = self.declare_hidden(parameters, key.rows, key.active)
            shared, _ = self.declare_weights(parameters, Segment(False, (), True))
            return self.logits(scribe, shared, x)

        return compile_py_func(program)

    def loop(self, loop: LoopKey) -> HloModuleProto:
        """The program that makes up to `steps` tokens for each slot, and stops when no row wants more.

        Parameters: the rows s32[slots, LOOP_COLUMNS]; seen pred[slots, vocab]; the caches; the weights. Results:
        tokens s32[slots, steps], where a row has none NOTHING; seen, with these tokens, and the caches, in place.
        """

        def program(scribe: HloScribe) -> list[Tensor]:
            parameters = hlo.Parameters()
            packed = parameters.add(dtype_named("s32")[self.slots, LOOP_COLUMNS], "rows")
            seen = self.declare_seen(parameters)
            caches = self.declare_caches(parameters, len(self.layers))
            weights = self.declare_weights(parameters, self.whole)
            rows = (hlo.reshape(hlo.slice(packed, 1, i, i + 1), self.slots) for i in range(3))
            tokens = hlo.full(NOTHING, "s32", [self.slots, loop.steps])
            state = [hlo.constant(0, "s32"), *rows, seen, tokens]
            (*_, seen_after, tokens), after = looped(
                lambda i, token, position, wanted, *_: hlo.logical_and(i < loop.steps, hlo.any(wanted > 0, 0)),
                self._next_tokens(scribe, weights, packed, loop.width),
                state,
                caches,
                None if self.in_place else loop.width,
            )
            return [tokens, *in_place([seen_after], [seen]), *after]

        return compile_py_func(program)

    def _next_tokens(
        self, scribe: HloScribe, weights: tuple[Any, list[Any]], packed: Tensor, width: int
    ) -> Callable[..., list[Tensor]]:
        """What the loop does once: feed each row's token, choose the next."""
        policy, eos = rules_of(packed)

        def body(
            i: Tensor, token: Tensor, position: Tensor, wanted: Tensor, seen: Tensor, tokens: Tensor, *flat: Tensor
        ) -> list[Tensor]:
            active = wanted > 0
            count = hlo.convert(active, "s32")
            step = Step(hlo.reshape(token, -1, 1), position, count, position + count, None, width)
            caches = self.by_layer(flat)
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
        """The program that chooses after each of several tokens, as the loop would if it had made them.

        Parameters: the step, s32[slots, 4 + active]; s32[slots, POLICY_COLUMNS]; seen pred[slots, vocab], without the
        step's tokens but the first; the caches; the weights. Results: tokens s32[slots, active]; the caches, in place.
        """

        def program(scribe: HloScribe) -> list[Tensor]:
            parameters = hlo.Parameters()
            step = declare_step(parameters, self.slots, verify.active, verify.width, own_slots=False)
            policy = unpacked(parameters.add(dtype_named("s32")[self.slots, POLICY_COLUMNS], "policy"))
            seen = self.declare_seen(parameters)
            caches = self.declare_caches(parameters, len(self.layers))
            weights = self.declare_weights(parameters, self.whole)
            x, after = self.body(scribe, self.whole, *weights, None, caches, step)
            tokens = sampled_after(self.logits(scribe, weights[0], x), step, seen, policy)
            return [side_by_side(tokens), *in_place(flattened(after), flattened(caches))]

        return compile_py_func(program)

    def sample(self, rows: int) -> HloModuleProto:
        """The choice of tokens from the logits that a step has left on the devices.

        Parameters: logits f32[rows, 1, vocab]; seen pred[slots, vocab]; s32[rows, 2 + POLICY_COLUMNS] with the slot,
        the position and the policy of each row, where a slot of -1 is of a row that chooses nothing. Results: tokens
        s32[rows]; seen, with these tokens, in place.
        """
        vocab = self.config.vocab_size

        def program(scribe: HloScribe) -> list[Tensor]:
            parameters = hlo.Parameters()
            logits = hlo.reshape(parameters.add(dtype_named("f32")[rows, 1, vocab], "logits"), rows, vocab)
            seen = self.declare_seen(parameters)
            packed = parameters.add(dtype_named("s32")[rows, 2 + POLICY_COLUMNS], "rows")
            slots, position = (hlo.reshape(hlo.slice(packed, 1, i, i + 1), rows) for i in range(2))
            policy = unpacked(hlo.slice(packed, 1, 2, 2 + POLICY_COLUMNS))
            named = hlo.maximum(slots, 0)
            own = seen if rows == self.slots else hlo.take(seen, named)
            tokens = hlo.select(slots >= 0, sample(logits, own, policy, position), NOTHING)
            after = with_tokens(seen, tokens, None if rows == self.slots else named)
            return [tokens, *in_place([after], [seen])]

        return compile_py_func(program)

    def reorder(self) -> HloModuleProto:
        """The program that gives every slot the cache of the slot named for it, or zeros where that is negative.

        Parameters: s32[slots], the caches. Results: the caches, in place.
        """

        def reorder(scribe: HloScribe) -> list[Tensor]:
            parameters = hlo.Parameters()
            source = parameters.add(dtype_named("s32")[self.slots], "source")
            caches = flattened(self.declare_caches(parameters, self.config.n_layer))
            outputs = []
            for cache in caches:
                by_slot = hlo.take(hlo.reshape(cache, self.slots, -1, *cache.sizes[1:]), source)
                by_slot = hlo.select(hlo.reshape(source >= 0, -1, 1, 1, 1), by_slot, 0)
                outputs.append(hlo.reshape(by_slot, *cache.sizes))
            return in_place(outputs, caches)

        return compile_py_func(reorder)

    def declare_caches(self, parameters: hlo.Parameters, count: int) -> list[Cache]:
        return [declare_cache(parameters, self.cache_arrays, f"layer.{layer}.") for layer in range(count)]

    def declare_seen(self, parameters: hlo.Parameters) -> Tensor:
        """Which tokens each slot's sequence has, pred[slots, vocab]; only penalties look at it."""
        return parameters.add(dtype_named("pred")[self.slots, self.config.vocab_size], "seen")

    def declare_hidden(self, parameters: hlo.Parameters, rows: int, active: int) -> Tensor:
        return parameters.add(dtype_named(self.dtype)[rows, active, self.config.hidden_size], "hidden")

    def declare_weights(self, parameters: hlo.Parameters, segment: Segment) -> tuple[Any, list[Any]]:
        """The weights outside the layers, if the segment needs them, and those of each of its layers."""
        tables = [self.shared_table] if segment.embed or segment.head else []
        shared = [declare(table, parameters, self.dtype, self.degree) for table in tables]
        scopes = [f"layer.{layer}." for layer in range(len(segment.layers))]
        layers = [declare(self.layer_table, parameters, self.dtype, self.degree, scope) for scope in scopes]
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
    ) -> tuple[Tensor, list[Cache]]:
        """The family's graph up to its head: the hidden state [b, n, h], and the caches after the step."""
        if segment.embed:
            with scribe.scope("embed"):
                x = self.graph.embed(self.config, shared, step)
        prepared = [self.graph.prepare(self.config, step)] if hasattr(self.graph, "prepare") else []
        after = []
        for number, (weights, cache, kind) in enumerate(zip(layers, caches, segment.layers, strict=True)):
            with scribe.scope(f"layer.{number}"):
                kinds = [kind] if kind else []
                x, cache = self.graph.layer(self.config, weights, x, cache, step, *prepared, *kinds)
                after.append(cache)
        assert x is not None
        return x, after

    def logits(self, scribe: HloScribe, shared: Any, x: Tensor, last: Step | None = None) -> Tensor:
        """The family's head, of each row's last token where that step is given. x [b, n, h] -> f32[b, n or 1, vocab]"""
        with scribe.scope("head"):
            logits: Tensor = self.graph.head(self.config, shared, last.last(x) if last else x)
        return logits


def flattened(caches: list[Cache]) -> list[Tensor]:
    return [tensor for cache in caches for tensor in cache]


def looped(
    condition: Callable[..., Tensor],
    body: Callable[..., list[Tensor]],
    state: list[Tensor],
    caches: list[Cache],
    width: int | None,
    rounds: int | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """A `while_loop` with `state` and then the caches as its state: the state after it, and the caches in place.

    While it runs the caches are cut to `width` positions, if that is given: cutting them at each step costs more than
    it saves. There are so many `rounds`, if that is known.
    """
    flat = flattened(caches)
    cut = [cache if width in (None, cache.sizes[1]) else hlo.slice(cache, 1, 0, width) for cache in flat]
    result = hlo.while_loop(condition, body, [*state, *cut], rounds)
    after = [
        new if new.sizes == cache.sizes else hlo.dynamic_update_slice(cache, new, [0, 0, 0])
        for new, cache in zip(result[len(state) :], flat, strict=True)
    ]
    return result[: len(state)], in_place(after, flat)


def in_place(after: list[Tensor], before: list[Tensor]) -> list[Tensor]:
    """The results `after`, each in the memory of the parameter it was made of."""
    for result, parameter in zip(after, before, strict=True):
        result.set_alias_to(parameter, must=True)
    return after
