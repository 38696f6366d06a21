"""The weight table of LLaMA and the families like it."""

from collections.abc import Sequence

from transformers_neuronx.llama.graph import LlamaLike
from transformers_neuronx.weights import COLUMNS, Layout, Weight, as_is, attention, gated_mlp, linear, norm

PREFIX = "model."
BLOCK = PREFIX + "layers.{}."


def table(config: LlamaLike) -> list[Weight]:
    projections = [(f"{BLOCK}self_attn.{name}_proj", as_is) for name in "qkvo"]
    feed_forward = [(f"{BLOCK}mlp.{name}_proj", as_is) for name in ("gate", "up", "down")]
    return table_of(config, projections, feed_forward)


def table_of(
    config: LlamaLike, projections: Sequence[tuple[str, Layout]], feed_forward: Sequence[tuple[str, Layout]]
) -> list[Weight]:
    """The table with these names and layouts of queries, keys, values and output, and of gate, up and down."""
    h, d, inner = config.hidden_size, config.head_dim, config.inner_size
    biased, qkv_biased = config.attention_bias, config.attention_bias or config.qkv_bias
    head = PREFIX + "embed_tokens" if config.tied else "lm_head"
    return [
        Weight("embed", PREFIX + "embed_tokens.weight", (config.vocab_size, h), split=COLUMNS),
        *norm("attn_norm", BLOCK + "input_layernorm", h, bias=False),
        *attention("attn", config.attention_heads, h, projections, bias=qkv_biased, out_bias=biased),
        *(norm("attn.q_norm", BLOCK + "self_attn.q_norm", d, bias=False) if config.qk_norm else []),
        *(norm("attn.k_norm", BLOCK + "self_attn.k_norm", d, bias=False) if config.qk_norm else []),
        *norm("mlp_norm", BLOCK + "post_attention_layernorm", h, bias=False),
        *gated_mlp("mlp", feed_forward, inner, h, bias=config.mlp_bias),
        *norm("final_norm", PREFIX + "norm", h, bias=False),
        *linear("head", head, config.vocab_size, h, COLUMNS, bias=False),
    ]


def ignored(config: LlamaLike) -> list[str]:
    return [r"lm_head\.weight"] if config.tied else []
