"""Mixtral's weight table."""

from transformers_neuronx.mixtral.config import MixtralConfig
from transformers_neuronx.weights import (
    COLUMNS,
    ROWS,
    Weight,
    as_is,
    attention,
    linear,
    norm,
    part_if_fused,
    stacked,
)

PREFIX = "model."


def table(config: MixtralConfig) -> list[Weight]:
    h = config.hidden_size
    block = PREFIX + "layers.{}."
    projections = [(f"{block}self_attn.{name}_proj", as_is) for name in "qkvo"]
    head = PREFIX + "embed_tokens" if config.tied else "lm_head"
    router = f"{block}block_sparse_moe.gate.weight|{block}mlp.gate.weight"
    return [
        Weight("embed", PREFIX + "embed_tokens.weight", (config.vocab_size, h), split=COLUMNS),
        *norm("attn_norm", block + "input_layernorm", h, bias=False),
        *attention("attn", config.attention_heads, h, projections, bias=False, out_bias=False),
        *norm("mlp_norm", block + "post_attention_layernorm", h, bias=False),
        Weight("moe.router.weight", router, (config.n_expert, h)),
        *stacked(config.n_expert, _expert(config, block)),
        *norm("final_norm", PREFIX + "norm", h, bias=False),
        *linear("head", head, config.vocab_size, h, COLUMNS, bias=False),
    ]


def _expert(config: MixtralConfig, block: str) -> list[Weight]:
    h, inner = config.hidden_size, config.inner_size
    each = f"{block}block_sparse_moe.experts.#.w"
    both, down = (f"|{block}mlp.experts.{name}" for name in ("gate_up_proj", "down_proj"))  # in Transformers' memory
    return [
        Weight("moe.gate.weight", f"{each}1.weight{both}", (inner, h), part_if_fused(0, inner), COLUMNS),
        Weight("moe.up.weight", f"{each}3.weight{both}", (inner, h), part_if_fused(1, inner), COLUMNS),
        Weight("moe.down.weight", f"{each}2.weight{down}", (h, inner), split=ROWS),
    ]


def ignored(config: MixtralConfig) -> list[str]:
    return [r"lm_head\.weight"] if config.tied else []
