"""The weight table of Gemma 4: LLaMA's for each kind of layer, and what a layer has of each token."""

import functools

import torch

from transformers_neuronx.gemma4text.config import READS, Gemma4TextConfig
from transformers_neuronx.llama import weights
from transformers_neuronx.llama.weights import BLOCK, PREFIX as PREFIX, ignored as ignored
from transformers_neuronx.weights import COLUMNS, Layout, Weight, also_named, experts, norm, of_kinds

OF_KEYS = ("attn.k.", "attn.v.", "attn.k_norm.", "attn.v_norm.")
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")


def table(config: Gemma4TextConfig) -> list[Weight]:
    rows = [row for row in weights.table(config) if not row.name.startswith(("attn.", "mlp."))]
    for kind in dict.fromkeys(config.layer_kinds):
        rows += of_kinds({kind}, _of_kind(config, kind))
    rows.append(Weight("scalar", BLOCK + "layer_scalar", (1,)))
    return rows + (_inputs(config) if config.input_size else []) + (_mixture(config) if config.mixture else [])


def _of_kind(config: Gemma4TextConfig, kind: str) -> list[Weight]:
    """Attention and feed-forward of a kind of layer."""
    own = config.of_kind(kind)
    rows = [row for row in weights.table(own) if row.name.startswith(("attn.", "mlp."))]
    if kind.endswith(READS):
        return [row for row in rows if not row.name.startswith(OF_KEYS)]
    if config.keys_as_values and kind == "full_attention":
        rows = [row for row in rows if not row.name.startswith("attn.v.")]
    ones = functools.partial(torch.ones, own.head_dim)
    return [*rows, Weight("attn.v_norm.weight", BLOCK, (own.head_dim,), dtype="f32", value=ones)]


def _inputs(config: Gemma4TextConfig) -> list[Weight]:
    """What makes the inputs of all layers, and what each layer does with its own."""
    h, size, every = config.hidden_size, config.input_size, config.n_layer * config.input_size
    return [
        Weight("inputs.embed", f"{PREFIX}embed_tokens_per_layer.weight", (config.input_vocab, every), split=COLUMNS),
        Weight("inputs.projection.weight", f"{PREFIX}per_layer_model_projection.weight", (every, h)),
        *norm("inputs.norm", f"{PREFIX}per_layer_projection_norm", size, bias=False),
        Weight("input.gate.weight", f"{BLOCK}per_layer_input_gate.weight", (size, h)),
        Weight("input.out.weight", f"{BLOCK}per_layer_projection.weight", (h, size)),
        *norm("input_out_norm", f"{BLOCK}post_per_layer_input_norm", h, bias=False),
    ]


def _mixture(config: Gemma4TextConfig) -> list[Weight]:
    h, count = config.hidden_size, config.n_expert
    rows = experts("moe", BLOCK, count, "router.proj", (), EXPERTS, config.expert_size, h)
    return [
        *also_named(rows, {"experts.": "experts.#."}),  # in few bits, each expert has a matrix of its own
        Weight("moe.router.scale", BLOCK + "router.per_expert_scale", (count,), dtype="f32"),
        Weight("router_norm.weight", BLOCK + "router.scale", (h,), times(h**-0.5), dtype="f32"),
    ]


@functools.cache
def times(factor: float) -> Layout:
    """Layout: multiply by a factor."""
    return lambda tensor: tensor.float() * factor
