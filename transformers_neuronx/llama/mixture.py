"""What mixtures of experts with LLaMA's graph can have different, and the rows of their feed-forward blocks."""

from collections.abc import Collection
from typing import ClassVar

from transformers_neuronx.layers import Router
from transformers_neuronx.llama.like import LlamaLike
from transformers_neuronx.weights import Weight, experts, flattened, mlp, of_kinds, parts_of

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

    # The names of the router, and of gate, up and down of the expert `#`; or of gate and up as one, and of down, with
    # all experts in a stack. What is added to scores where experts are chosen, if anything is.
    router_name: ClassVar[str] = "mlp.gate"
    of_expert: ClassVar[tuple[str, ...]] = tuple(f"mlp.experts.#.{part}_proj" for part in ("gate", "up", "down"))
    of_experts: ClassVar[tuple[str, ...]] = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    correction: ClassVar[str] = ""

    # A block for all tokens: its inner size, if there is one, its names, and that of its gate, if it has one.
    shared_size: int = 0
    shared: ClassVar[tuple[str, ...]] = tuple(f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down"))
    shared_gate: ClassVar[str] = ""

    # What attention of each layer reads, if they differ. All but each `sparse_step`th layer, and more, have no experts.
    attention_kinds: list[str] | None = None
    sparse_step: int = 1
    dense_too: Collection[int] = ()

    @property
    def dense_layers(self) -> Collection[int]:
        return {n for n in range(self.n_layer) if (n + 1) % self.sparse_step}.union(self.dense_too)

    @property
    def layer_kinds(self) -> list[str]:
        kinds = self.attention_kinds or [""] * self.n_layer
        return [kind + DENSE if n in self.dense_layers else kind for n, kind in enumerate(kinds)]

    @property
    def router(self) -> Router:
        how = self.sigmoid, self.normalized, self.routed_scale, self.groups, self.active_groups
        return Router(self.active_experts, *how)

    def window_of(self, kind: str) -> int | None:
        return super().window_of(kind.removesuffix(DENSE))


def feed_forward(config: LlamaLike, block: str) -> list[Weight]:
    """The rows of a layer's feed-forward, or of its mixture, by kinds of layers. Names begin with `block`."""
    hidden, inner, bias = config.hidden_size, config.inner_size, config.mlp_bias
    dense = mlp("mlp", parts_of(block, config.feed_forward, [inner, inner, hidden]), inner, hidden, bias=bias)
    if not isinstance(config, MixtureLike):
        return dense
    names = config.router_name, config.of_expert, config.of_experts
    rows = experts("moe", block, config.n_expert, *names, config.expert_size or inner, hidden)
    if config.correction:
        source = "|".join(block + name for name in config.correction.split("|"))
        rows.append(Weight("moe.router.correction", source, (config.n_expert,), flattened, dtype="f32"))
    if size := config.shared_size:
        rows += mlp("moe.shared", parts_of(block, config.shared, [size, size, hidden]), size, hidden, bias=bias)
    if config.shared_gate:
        rows.append(Weight("moe.shared_gate.weight", f"{block}{config.shared_gate}.weight", (1, hidden)))
    kinds = set(config.layer_kinds)
    without = {kind for kind in kinds if kind.endswith(DENSE)}
    return [*of_kinds(without, dense), *of_kinds(kinds - without, rows)]
