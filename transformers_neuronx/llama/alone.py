"""Families in which each layer is one block alone: attention, Mamba-2 in its place, a feed-forward or a mixture."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from transformers_neuronx.layers import Cache, State, Step
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.graph import embed as embed, head as head, norm as norm, prepare as prepare
from transformers_neuronx.llama.hybrid import HybridLike
from transformers_neuronx.pyhlo import Tensor
from transformers_neuronx.weights import Weight, mlp, parts_of

KINDS = dict(attn="full_attention", mamba="linear_attention", mlp="mlp", moe="moe")  # by the names of their weights


class AloneLike(HybridLike):
    """A configuration for layers of these kinds, with a norm before each block."""

    norms: ClassVar = {"norm": "norm"}

    def states_of(self, kind: str) -> Sequence[State]:
        return self.states if kind == KINDS["mamba"] else ()


def table(config: AloneLike) -> list[Weight]:
    """LLaMA's, where layers of each kind have the rows of its block."""
    h, outputs = config.hidden_size, [config.inner_size] * 2
    dense = mlp("mlp", parts_of(weights.BLOCK, config.feed_forward, outputs), outputs[0], h, bias=config.mlp_bias)
    there: Sequence[str] = getattr(config, "layer_kinds", ())
    found = [(row, KINDS.get(row.name.partition(".")[0])) for row in [*weights.table(config), *dense]]
    return [replace(row, kinds=frozenset({kind})) if kind else row for row, kind in found if kind in (None, *there)]


def layer(
    config: AloneLike, w: Any, x: Tensor, cache: Cache, step: Step, rotate: graph.Rotations, kind: str
) -> tuple[Tensor, Cache]:
    y, x = graph.normed(config, w, "norm", x), step.needed_rows(x)
    if kind in (KINDS["attn"], KINDS["mamba"]):
        y, cache = graph.mix(config, w, y, cache, step, rotate[kind], None)
        return x + y, cache
    return x + graph.feed_forward(config, w, step.needed_rows(y)), cache
