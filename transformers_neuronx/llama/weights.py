"""LLaMA's weight table."""

from transformers_neuronx.llama.config import LlamaConfig
from transformers_neuronx.weights import COLUMNS, Weight, as_is, attention, gated_mlp, linear, norm

PREFIX = "model."


def table(config: LlamaConfig) -> list[Weight]:
    h, inner = config.hidden_size, config.inner_size
    block = PREFIX + "layers.{}."
    projections = [(f"{block}self_attn.{name}_proj", as_is) for name in "qkvo"]
    feed_forward = [(f"{block}mlp.{name}_proj", as_is) for name in ("gate", "up", "down")]
    biased = config.attention_bias
    return [
        Weight("embed", PREFIX + "embed_tokens.weight", (config.vocab_size, h), split=COLUMNS),
        *norm("attn_norm", block + "input_layernorm", h, bias=False),
        *attention("attn", config.attention_heads, h, projections, bias=biased, out_bias=biased),
        *norm("mlp_norm", block + "post_attention_layernorm", h, bias=False),
        *gated_mlp("mlp", feed_forward, inner, h, bias=config.mlp_bias),
        *norm("final_norm", PREFIX + "norm", h, bias=False),
        *linear(
            "head", PREFIX + "embed_tokens" if config.tied else "lm_head", config.vocab_size, h, COLUMNS, bias=False
        ),
    ]


def ignored(config: LlamaConfig) -> list[str]:
    return [r"lm_head\.weight"] if config.tied else []
