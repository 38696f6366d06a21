"""Mixtral's weight table."""

from transformers_neuronx.mixtral.config import MixtralConfig
from transformers_neuronx.weights import COLUMNS, ROWS, Weight, as_is, attention, expert, linear, norm

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
        *(row for number in range(config.n_expert) for row in _expert(config, block, number)),
        *norm("final_norm", PREFIX + "norm", h, bias=False),
        *linear("head", head, config.vocab_size, h, COLUMNS, bias=False),
    ]


def _expert(config: MixtralConfig, block: str, number: int) -> list[Weight]:
    h, inner = config.hidden_size, config.inner_size
    name, source = f"moe.experts.{number}", f"{block}block_sparse_moe.experts.{number}.w"
    stacked = f"|{block}mlp.experts."  # as Transformers has them in memory
    both = stacked + "gate_up_proj"
    return [
        Weight(f"{name}.gate.weight", f"{source}1.weight{both}", (inner, h), expert(number, 0, 2), COLUMNS),
        Weight(f"{name}.up.weight", f"{source}3.weight{both}", (inner, h), expert(number, 1, 2), COLUMNS),
        Weight(f"{name}.down.weight", f"{source}2.weight{stacked}down_proj", (h, inner), expert(number), ROWS),
    ]


def ignored(config: MixtralConfig) -> list[str]:
    return [r"lm_head\.weight"] if config.tied else []
