"""BLOOM's weight table. Its checkpoints store queries, keys and values in one layer, head by head."""

from functools import partial

from transformers_neuronx.bloom.config import BloomConfig
from transformers_neuronx.layers import alibi_slopes
from transformers_neuronx.weights import COLUMNS, ROWS, Weight, as_is, attention, linear, norm, part_per_head

PREFIX = "transformer."


def table(config: BloomConfig) -> list[Weight]:
    h, heads = config.hidden_size, config.attention_heads
    block = PREFIX + "h.{}."
    qkv = [(block + "self_attention.query_key_value", part_per_head(i, 3, heads.head_dim)) for i in range(3)]
    out = (block + "self_attention.dense", as_is)
    slopes = partial(alibi_slopes, heads.heads)
    return [
        Weight("embed", PREFIX + "word_embeddings.weight", (config.vocab_size, h), split=COLUMNS),
        *norm("embed_norm", PREFIX + "word_embeddings_layernorm", h),
        *norm("attn_norm", block + "input_layernorm", h),
        *attention("attn", heads, h, [*qkv, out], bias=True, out_bias=True),
        Weight("attn.alibi", block, (heads.heads,), split=heads.split(0, unit=1), dtype="f32", value=slopes),
        *norm("mlp_norm", block + "post_attention_layernorm", h),
        *linear("mlp.up", block + "mlp.dense_h_to_4h", 4 * h, h, COLUMNS),
        *linear("mlp.down", block + "mlp.dense_4h_to_h", h, 4 * h, ROWS),
        *norm("final_norm", PREFIX + "ln_f", h),
        *linear(
            "head", PREFIX + "word_embeddings" if config.tied else "lm_head", config.vocab_size, h, COLUMNS, bias=False
        ),
    ]


def ignored(config: BloomConfig) -> list[str]:
    return [r"lm_head\.weight"] if config.tied else []
