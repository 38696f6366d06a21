"""GPT-2's weight table. Its checkpoints store queries, keys and values in one `Conv1D`, [in, 3 out]."""

from transformers_neuronx.gpt2.config import GPT2Config
from transformers_neuronx.weights import COLUMNS, ROWS, Weight, attention, linear, norm, part, transposed

PREFIX = "transformer."


def table(config: GPT2Config) -> list[Weight]:
    h, inner = config.hidden_size, config.inner_size
    block = PREFIX + "h.{}."
    qkv = [(block + "attn.c_attn", part(i, 3, transposed)) for i in range(3)]
    out = (block + "attn.c_proj", transposed)
    return [
        Weight("embed", PREFIX + "wte.weight", (config.vocab_size, h), split=COLUMNS),
        Weight("positions", PREFIX + "wpe.weight", (config.n_positions, h)),
        *norm("attn_norm", block + "ln_1", h),
        *attention("attn", config.attention_heads, h, [*qkv, out], bias=True, out_bias=True),
        *norm("mlp_norm", block + "ln_2", h),
        *linear("mlp.up", block + "mlp.c_fc", inner, h, COLUMNS, layout=transposed),
        *linear("mlp.down", block + "mlp.c_proj", h, inner, ROWS, layout=transposed),
        *norm("final_norm", PREFIX + "ln_f", h),
        *linear("head", PREFIX + "wte" if config.tied else "lm_head", config.vocab_size, h, COLUMNS, bias=False),
    ]


def ignored(config: GPT2Config) -> list[str]:
    causal_masks = r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias"  # in older checkpoints
    return [causal_masks, r"lm_head\.weight"] if config.tied else [causal_masks]
