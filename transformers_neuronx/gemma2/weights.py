"""Gemma 2's weight table. Its norms multiply by one plus their weight; the one is added here."""

from transformers_neuronx.gemma2.config import Gemma2Config
from transformers_neuronx.weights import COLUMNS, Weight, as_is, attention, gated_mlp, linear, norm, plus_one

PREFIX = "model."


def table(config: Gemma2Config) -> list[Weight]:
    h, inner = config.hidden_size, config.inner_size
    block = PREFIX + "layers.{}."
    projections = [(f"{block}self_attn.{name}_proj", as_is) for name in "qkvo"]
    norms = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    names = ("attn_norm", "attn_out_norm", "mlp_norm", "mlp_out_norm")
    return [
        Weight("embed", PREFIX + "embed_tokens.weight", (config.vocab_size, h), split=COLUMNS),
        *(
            row
            for name, source in zip(names, norms, strict=True)
            for row in norm(name, block + source, h, bias=False, layout=plus_one)
        ),
        *attention("attn", config.attention_heads, h, projections, bias=False, out_bias=False),
        *gated_mlp("mlp", [(f"{block}mlp.{name}_proj", as_is) for name in ("gate", "up", "down")], inner, h),
        *norm("final_norm", PREFIX + "norm", h, bias=False, layout=plus_one),
        *linear("head", PREFIX + "embed_tokens", config.vocab_size, h, COLUMNS, bias=False),
    ]


def ignored(config: Gemma2Config) -> list[str]:
    return [r"lm_head\.weight"]
