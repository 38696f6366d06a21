"""Hybrids with LLaMA's graph: some layers keep states of a sequence in place of keys and values."""

from collections.abc import Sequence
from typing import Any

from transformers_neuronx.layers import Cache, State, Step
from transformers_neuronx.llama.like import LlamaLike
from transformers_neuronx.pyhlo import Tensor
from transformers_neuronx.weights import Heads, Weight, of_kinds

HYBRID_KINDS = ("linear_attention", "full_attention")


class HybridLike(LlamaLike):
    """A configuration for LLaMA's graph in which layers of some kinds have another layer in place of attention.

    Its subclasses say which layer that is: what it keeps, what it computes and its weights.
    """

    @property
    def states(self) -> Sequence[State]:
        """What such a layer keeps of a sequence."""
        raise NotImplementedError

    def mixed(self, x: Tensor, w: Any, cache: Cache, step: Step) -> tuple[Tensor, Cache]:
        """Apply it. x [b, n, h] -> [b, n, h], and its states; `w` are the weights of a block."""
        raise NotImplementedError

    def rows(self, block: str) -> list[Weight]:
        """Its rows of the weight table. Names begin with `block`."""
        raise NotImplementedError

    def heads_of(self, kind: str) -> Heads | None:
        return self.attention_heads if kind.startswith("full_attention") else None  # with experts or without

    def states_of(self, kind: str) -> Sequence[State]:
        return () if self.heads_of(kind) else self.states


def mixers(config: LlamaLike, block: str, attention: Sequence[Weight]) -> list[Weight]:
    """The rows of attention, in layers that have it, and of what others have in its place."""
    kinds = {*getattr(config, "layer_kinds", [""])}
    without = {kind for kind in kinds if config.heads_of(kind) is None}
    rows = of_kinds(kinds - without, attention) if without else [*attention]
    return rows + (of_kinds(without, config.rows(block)) if isinstance(config, HybridLike) and without else [])
