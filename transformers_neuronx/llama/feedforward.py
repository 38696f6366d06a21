"""The rows of LLaMA's feed-forward blocks, and of mixtures of experts in their place."""

from transformers_neuronx.llama.like import LlamaLike
from transformers_neuronx.llama.mixture import DENSE, MixtureLike
from transformers_neuronx.weights import Weight, experts, flattened, mlp, of_kinds, parts_of


def feed_forward(config: LlamaLike, block: str) -> list[Weight]:
    """The rows of a layer's feed-forward, or of its mixture, by kinds of layers. Names begin with `block`."""
    hidden, inner, bias = config.hidden_size, config.inner_size, config.mlp_bias
    dense = mlp("mlp", parts_of(block, config.feed_forward, [inner, inner, hidden]), inner, hidden, bias=bias)
    if not isinstance(config, MixtureLike):
        return dense
    names = config.router_name, config.of_expert, config.of_experts
    of_expert = config.expert_size or inner
    rows = experts("moe", block, config.n_expert, *names, of_expert, hidden)
    if config.correction:
        source = "|".join(block + name for name in config.correction.split("|"))
        rows.append(Weight("moe.router.correction", source, (config.n_expert,), flattened, dtype="f32"))
    if size := config.shared_size or config.n_shared * of_expert:
        rows += mlp("moe.shared", parts_of(block, config.shared, [size, size, hidden]), size, hidden, bias=bias)
    if config.shared_gate:
        rows.append(Weight("moe.shared_gate.weight", f"{block}{config.shared_gate}.weight", (1, hidden)))
    kinds = set(config.layer_kinds)
    without = {kind for kind in kinds if kind.endswith(DENSE)}
    return [*of_kinds(without, dense), *of_kinds(kinds - without, rows)]
