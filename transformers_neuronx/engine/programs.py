"""What all programs of one model have in common: its weights, its caches, and the family's graph applied to a step.

The key of a program writes it with this: it defines the order of parameters and results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from typing import Any, Self, cast

from transformers_neuronx import hlo
from transformers_neuronx.config import CompileOptions
from transformers_neuronx.engine.family import (
    ENCODER_LAYER,
    ENCODER_ONLY,
    DecoderConfig,
    EncoderDecoderConfig,
    Family,
    VisionConfig,
)
from transformers_neuronx.engine.keys import Segment
from transformers_neuronx.engine.kv_cache import CacheLayout, LayerCache, MemoryLayout
from transformers_neuronx.layers.lora import chosen
from transformers_neuronx.layers.memory import Memory
from transformers_neuronx.layers.step import Cache, Placed, Step, declare_placed
from transformers_neuronx.pyhlo import HloScribe, Tensor, dtype_named
from transformers_neuronx.weights.lora import AdapterLayout
from transformers_neuronx.weights.outputs import Outputs
from transformers_neuronx.weights.parameters import declare
from transformers_neuronx.weights.quantization import in_panels, quantized
from transformers_neuronx.weights.rows import Weight, with_whole_experts

LAST = -1  # among features: the hidden states that the head is applied to


class Programs:
    """Writes the HLO modules of a family's model for `degree` devices.

    With `panels`, matrices of linear layers are stored in panels. `attends(dtype, head_dim)` tells whether a kernel
    reads caches in place, and only the positions in use; then loops carry whole caches. With `scatters`, rows are
    written to them at once.
    """

    def __init__(
        self,
        family: Family,
        config: DecoderConfig,
        options: CompileOptions,
        degree: int,
        panels: bool = False,
        attends: Callable[[str, int], bool] = lambda dtype, head_dim: False,
        scatters: bool = False,
    ) -> None:
        self.family, self.graph = family, family.graph
        self.options = options
        self.config = config
        self.dtype = options.amp
        self.slots = options.batch_size
        self.positions = options.buckets.longest
        self.degree = degree
        self.layers = tuple(getattr(config, "layer_kinds", [""] * config.n_layer))
        kinds = {kind: self._cache_of(kind) for kind in dict.fromkeys(self.layers)}
        self.cache = CacheLayout(self.layers, kinds, self._memory(), self.slots)
        dense = options.sparse is None or options.sparse.window is not None
        kept = [(each.heads or config.attention_heads, each) for each in self.cache.kinds.values()]
        self.in_place = dense and all(not one.spread and attends(one.dtype, heads.head_dim) for heads, one in kept)
        self.reads_pages = self.in_place and family.pages
        self.panels, self.scatters = panels, scatters
        self.adapters: AdapterLayout | None = None
        self.features: tuple[int, ...] = ()
        rows = Outputs(options.head, options.score, options.score_tokens).rows(family.weights.table(config))
        table = quantized(with_whole_experts(rows) if options.expert_parallel else rows, options.quant)
        self.table = self._numbered(in_panels(table, self.dtype) if panels else table)
        apart = family.encoder or family.tower
        rows = [row for row in self.table if not (apart and row.name.startswith(ENCODER_ONLY))]
        self.shared_table = [row for row in rows if not row.layered]
        self.layer_table = [row for row in rows if row.layered]
        self.alike = self._alike()

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

    def _memory(self) -> MemoryLayout | None:
        """Return what there is for what an encoder has read, if the family has one."""
        if self.family.encoder is None:
            return None
        heads = self.config.attention_heads
        return MemoryLayout(
            self.slots, self.options.buckets.sources[-1], heads.kv_share(self.degree), heads.head_dim, self.dtype
        )

    def _numbered(self, table: list[Weight]) -> list[Weight]:
        """Return the table, where rows of the encoder's or the tower's layers have their number."""
        if self.family.encoder is None and self.family.tower is None:
            return table
        layers = cast(EncoderDecoderConfig, self.config).encoder_layers
        return [replace(row, layers=layers) if row.name.startswith(ENCODER_LAYER) else row for row in table]

    def _alike(self) -> tuple[int, ...]:
        """Return for each layer the first one with the same rows; nothing if all of a kind have the same."""
        if all(row.only is None for row in self.layer_table):
            return ()
        rows = [tuple(map(id, self.rows_of(layer))) for layer in range(len(self.layers))]
        return tuple(map(rows.index, rows))

    def rows_of(self, layer: int) -> list[Weight]:
        """The rows of the table that a layer has."""
        return [row for row in self.layer_table if layer in row.numbers(self.layers)]

    def over(self, cache: CacheLayout, adapters: AdapterLayout | None = None, features: tuple[int, ...] = ()) -> Self:
        """Return the programs for a cache of this layout, and for adapters that rows of steps may have. Features of a
        token are the hidden states before these layers, or LAST ones, side by side.
        """
        others = copy(self)
        others.cache, others.adapters, others.features = cache, adapters, features
        return others

    def adapters_of(self, places: int, rank: int) -> AdapterLayout:
        """Return the layout of places for so many adapters, of this rank at most."""
        table = self.family.weights.table(self.config)
        layout = AdapterLayout.of(table, places, rank)
        kept = quantized([*table, *layout.rows], self.options.quant)  # which also keeps groups of inputs whole
        return layout._replace(rows=[row for row in kept if layout.has(row)])

    @property
    def form(self) -> str:
        """What tells these programs from those for other caches and adapters, in artifacts."""
        features = "features" + "_".join(map(str, self.features)) if self.features else ""
        return " ".join(filter(None, [self.cache.pages, self.adapters.form if self.adapters else "", features]))

    @property
    def whole(self) -> Segment:
        return Segment(True, self.layers, True, self.alike)

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

    def visible(self, caches: list[Cache], width: int) -> list[Cache]:
        """Return what a loop carries of the caches to see `width` positions."""
        return caches if self.in_place else self.cache.cut(caches, width)

    def declare_seen(self, parameters: hlo.Parameters) -> Tensor:
        """Declare `seen`, the tokens that each slot's sequence has: pred[slots, vocab]. Only penalties read it."""
        return parameters.add(dtype_named("pred")[self.slots, self.config.vocab_size], "seen")

    def declare_hidden(self, parameters: hlo.Parameters, rows: int, active: int) -> Tensor:
        return parameters.add(dtype_named(self.dtype)[rows, active, self.config.hidden_size], "hidden")

    def declare_weights(self, parameters: hlo.Parameters, segment: Segment) -> tuple[Any, list[Any]]:
        """Declare the weights outside the layers if the segment needs them, and those of each of its layers.

        After them comes the memory, if there is an encoder, and the segment has layers, which attend to it.
        """
        tables = [self.shared_table] if segment.embed or segment.head else []
        shared = [declare(table, parameters, self.dtype, self.degree) for table in tables]
        alike = segment.alike or map(self.layers.index, segment.layers)
        scopes = [(self.rows_of(same), f"layer.{layer}.") for layer, same in enumerate(alike)]
        layers = [declare(table, parameters, self.dtype, self.degree, scope) for table, scope in scopes]
        if layers and self.cache.memory:
            lengths, *arrays = self.cache.memory.declare(parameters, len(layers))
            for weights, keys, values in zip(layers, arrays[::2], arrays[1::2], strict=True):
                weights.memory = Memory(keys, values, lengths)
        return shared[0] if shared else None, layers

    def declare_adapters(self, parameters: hlo.Parameters, layers: list[Any]) -> None:
        """Declare the adapters of all layers, whose weights were declared. They join these."""
        for number, weights in enumerate(layers if self.adapters else ()):
            assert self.adapters is not None
            rows = self.adapters.of_layer(number, self.layers)
            declare(rows, parameters, self.dtype, self.degree, f"layer.{number}.", weights)

    def declare_placed(self, parameters: hlo.Parameters, b: int, n: int) -> Placed | None:
        """Declare what stands in place of some tokens of a step, after all other parameters, if there is a tower."""
        if self.family.tower is None:
            return None
        return declare_placed(parameters, self.dtype, b, n, self.row_sizes)

    @property
    def row_sizes(self) -> tuple[int, int]:
        """Sizes of a row of an image."""
        return cast(VisionConfig, self.config).row_parts, self.config.hidden_size

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
        needed: Tensor | None = None,
        before: list[Tensor] | None = None,
    ) -> tuple[Tensor, list[Cache]]:
        """Apply the family's graph up to its head. Return the hidden state [b, n, h] and the new caches.

        In a step of single tokens, `segments` are those of `Step` for layers with each window. With `needed`, s32[·],
        fewer than all of the b * n tokens, only their hidden states are returned, [needed, 1, h]. Hidden states before
        each layer are added to `before`.
        """
        steps = self._steps_of(step, segments)
        step = next(iter(steps.values()))
        if segment.embed:
            with scribe.scope("embed"):
                x = self.graph.embed(self.config, shared, step)
        prepared = [self.family.prepare(self.config, step)] if self.family.prepare else []
        after = [*caches]
        for number, (weights, kind) in enumerate(zip(layers, segment.layers, strict=True)):
            if before is not None and x is not None:
                before.append(x)
            with scribe.scope(f"layer.{number}"):
                kinds = [kind] if kind else []
                source = self.config.source_of(number) if segment == self.whole else number
                own = steps[segment.layers[source]]
                own = replace(own, needed=needed) if number == len(layers) - 1 else own
                if self.adapters and own.adapters is not None:
                    weights = chosen(weights, [own.adapters, own.of_needed(own.adapters)], self.adapters.rank)
                x, after[source] = self.graph.layer(self.config, weights, x, after[source], own, *prepared, *kinds)
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
                    step, pattern=self.options.sparse, spread=cache.spread, scatters=self.scatters, segments=own
                )
            steps[kind] = of_cache[cache.spread, window]
        return steps

    def logits(self, scribe: HloScribe, shared: Any, x: Tensor, last: Step | None = None) -> Tensor:
        """Apply the head, to each row's last token only if that step is given. x [b, n, h] -> f32[b, n or 1, vocab]"""
        with scribe.scope("head"):
            return self.graph.head(self.config, shared, last.last(x) if last else x)

    def last_hidden(self, scribe: HloScribe, shared: Any, x: Tensor) -> Tensor:
        """Return what the head is applied to. x [b, n, h] -> [b, n, ·]"""
        with scribe.scope("head"):
            return self.graph.norm(self.config, shared, x)
