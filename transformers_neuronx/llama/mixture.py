"""What mixtures of experts with LLaMA's graph can have different."""

from collections.abc import Collection, Sequence
from typing import ClassVar

from transformers_neuronx.layers import Router
from transformers_neuronx.llama.like import LlamaLike

DENSE = " without experts"  # the end of the kind of a layer that has LLaMA's feed-forward


class MixtureLike(LlamaLike):
    """A `LlamaLike` with a mixture of experts in place of the feed-forward, in some layers or all."""

    # How many experts there are, how many are for a token, and the inner size of each, by default that of other layers.
    n_expert: int
    active_experts: int
    expert_size: int | None = None

    # How experts are chosen, as `Router` says.
    sigmoid: bool = False
    normalized: bool = True
    routed_scale: float = 1.0
    groups: int = 1
    active_groups: int = 1

    # The names of the router, and of gate, up and down of the expert `#`; or of gate and up as one, and of down, in
    # stacks. What is added to scores where experts are chosen, if anything is.
    router_name: ClassVar[str] = "mlp.gate"
    of_expert: ClassVar[tuple[str, ...]] = tuple(f"mlp.experts.#.{part}_proj" for part in ("gate", "up", "down"))
    of_experts: ClassVar[tuple[str, ...]] = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    correction: ClassVar[str] = ""

    # A block for all tokens, if there is one: its inner size, or of how many experts it has the size; its names, and
    # that of its gate, if it has one.
    shared_size: int = 0
    n_shared: int = 0
    shared: ClassVar[tuple[str, ...]] = tuple(f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down"))
    shared_gate: ClassVar[str] = ""

    attention_kinds: list[str] | None = None  # what attention of each layer reads, if they differ
    # Layers without experts: those that are "dense" if there are `blocks`, "dense" or "sparse" for each layer; or the
    # first ones, all but each `sparse_step`th, and others.
    blocks: Sequence[str] = ()
    first_dense: int = 0
    sparse_step: int = 1
    dense_too: Collection[int] = ()
    guesses: int = 0  # layers after the last one, which guess further tokens

    @property
    def unread(self) -> list[str]:
        return [rf"(model\.)?layers\.{self.n_layer + n}\..*" for n in range(self.guesses)]

    @property
    def dense_layers(self) -> Collection[int]:
        if self.blocks:
            return {n for n, block in enumerate(self.blocks) if block == "dense"}
        others = {n for n in range(self.n_layer) if (n + 1) % self.sparse_step}
        return others.union(range(self.first_dense), self.dense_too)

    @property
    def layer_kinds(self) -> list[str]:
        kinds = self.attention_kinds or [""] * self.n_layer
        return [kind + DENSE if n in self.dense_layers else kind for n, kind in enumerate(kinds)]

    @property
    def router(self) -> Router:
        groups = self.groups, self.active_groups
        return Router(self.active_experts, self.sigmoid, self.normalized, self.routed_scale, *groups)

    def window_of(self, kind: str) -> int | None:
        return super().window_of(kind.removesuffix(DENSE))
