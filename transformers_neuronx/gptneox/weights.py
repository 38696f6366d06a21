"""GPT-NeoX's weight table. Its checkpoints store queries, keys and values in one layer, head by head."""

from transformers_neuronx.gptneox.config import GPTNeoXConfig
from transformers_neuronx.weights import COLUMNS, ROWS, Weight, as_is, attention, linear, norm, part_per_head

PREFIX = "gpt_neox."


def table(config: GPTNeoXConfig) -> list[Weight]:
    h, inner, vocabulary = config.hidden_size, config.inner_size, (config.vocab_size, config.hidden_size)
    heads, biased = config.attention_heads, config.attention_bias
    block = PREFIX + "layers.{}."
    qkv = [(block + "attention.query_key_value", part_per_head(i, 3, heads.head_dim)) for i in range(3)]
    out = (block + "attention.dense", as_is)
    head = PREFIX + "embed_in.weight" if config.tied else "embed_out.weight|lm_head.weight"
    return [
        Weight("embed", PREFIX + "embed_in.weight", vocabulary, split=COLUMNS),
        *norm("attn_norm", block + "input_layernorm", h),
        *attention("attn", heads, h, [*qkv, out], bias=biased, out_bias=biased),
        *norm("mlp_norm", block + "post_attention_layernorm", h),
        *linear("mlp.up", block + "mlp.dense_h_to_4h", inner, h, COLUMNS),
        *linear("mlp.down", block + "mlp.dense_4h_to_h", h, inner, ROWS),
        *norm("final_norm", PREFIX + "final_layer_norm", h),
        Weight("head.weight", head, vocabulary, split=COLUMNS),
    ]


def ignored(config: GPTNeoXConfig) -> list[str]:
    causal_masks = r"(gpt_neox\.)?layers\.\d+\.attention\.(masked_)?bias"  # in older checkpoints
    return [causal_masks, r"(embed_out|lm_head)\.weight"] if config.tied else [causal_masks]
