"""The forward pass of Gemma 4: LLaMA's, where layers read keys of earlier ones, and have inputs of their own.

Hidden states are followed by the inputs of this layer and of later ones, if layers have inputs.
"""

from typing import Any, NamedTuple

from transformers_neuronx import hlo
from transformers_neuronx.gemma4text.config import READS, Gemma4TextConfig
from transformers_neuronx.layers import (
    Cache,
    Step,
    activated,
    attend,
    embedding,
    experts,
    gated_mlp,
    heads_of,
    linear,
    normalize,
)
from transformers_neuronx.llama import graph
from transformers_neuronx.llama.graph import head as head, norm as norm, normed, scaled
from transformers_neuronx.pyhlo import Tensor


class Shared(NamedTuple):
    """Rotations by kind of layer, and the keys and values that the last layer of each kind has made."""

    rotations: graph.Rotations
    made: dict[str, list[Tensor]]


def embed(config: Gemma4TextConfig, w: Any, step: Step) -> Tensor:
    x = graph.embed(config, w, step)
    if not config.input_size:
        return x
    own = scaled(embedding(w.inputs.embed, step.ids), config.input_size**0.5)  # [b, n, layers * size]
    given = scaled(linear(x, w.inputs.projection), config.hidden_size**-0.5)
    given = hlo.reshape(given, *x.sizes[:2], config.n_layer, config.input_size)
    given = hlo.reshape(normalize(given, w.inputs.norm, config.eps), *own.sizes)
    return hlo.concatenate([x, (given + own) * 2**-0.5], -1)


def prepare(config: Gemma4TextConfig, step: Step) -> Shared:
    return Shared(graph.prepare(config, step), {})


def layer(
    config: Gemma4TextConfig, w: Any, x: Tensor, cache: Cache, step: Step, shared: Shared, kind: str
) -> tuple[Tensor, Cache]:
    own, h, end = config.hidden_size, config.hidden_size + config.input_size, x.sizes[-1]
    before = normed(config, w, "attn_norm", hlo.slice(x, -1, 0, own))
    mixed, cache = mix(config, w.attn, before, cache, step, shared, kind)
    parts = (0, own), (own, min(h, end)), (min(h, end), end)
    x, given, later = (hlo.slice(step.needed_rows(x), -1, *ends) for ends in parts)
    x = x + normed(config, w, "attn_out_norm", mixed)
    x = x + normed(config, w, "mlp_out_norm", feed_forward(config, w, x))
    if config.input_size:
        y = linear(activated(x, config.activation, w.input.gate) * given, w.input.out)
        x = x + normed(config, w, "input_out_norm", y)
    x = x * w.scalar.tensor
    return hlo.concatenate([x, later], -1) if later.sizes[-1] else x, cache


def mix(
    config: Gemma4TextConfig, w: Any, x: Tensor, cache: Cache, step: Step, shared: Shared, kind: str
) -> tuple[Tensor, Cache]:
    """Attend to the keys and values of this layer, or of an earlier one, whose cache this is.

    It has them already. That the layer writes them again saves a kind of attention that only reads.
    """
    head_dim, own = config.of_kind(kind).head_dim, kind.removesuffix(READS)
    q, *made = heads_of(x, w, head_dim, shared.rotations[kind], norm_eps=config.eps)
    if made:
        shared.made[own] = made
    k, v = shared.made[own]
    return attend(x, q, k, v, w, cache, step, scale=config.attention_scale, window=config.window_of(kind))


def feed_forward(config: Gemma4TextConfig, w: Any, x: Tensor) -> Tensor:
    """Apply the feed-forward block, and with a mixture, experts beside it."""
    y = gated_mlp(normed(config, w, "mlp_norm", x), w.mlp, config.activation)
    if not config.mixture:
        return y
    routed_by = normalize(x, w.router_norm, config.eps)
    chosen = experts(normed(config, w, "moe_norm", x), w.moe, config.router, config.activation, routed_by)
    return normed(config, w, "dense_out_norm", y) + normed(config, w, "moe_out_norm", chosen)
