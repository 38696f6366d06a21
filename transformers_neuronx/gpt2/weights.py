"""GPT-2's weight table. Its checkpoints hold queries, keys and values in one `Conv1D`, [in, 3 out]."""

from transformers_neuronx.gpt2.config import GPT2Config
from transformers_neuronx.weights import Split, Weight, columns, linear, norm, part, rows, transposed

PREFIX = "transformer."


def table(config: GPT2Config) -> list[Weight]:
    h, inner = config.hidden_size, config.inner_size
    heads = columns(config.head_dim)
    block = PREFIX + "h.{}."
    return [
        Weight("embed", PREFIX + "wte.weight", (config.vocab_size, h), split=Split(axis=0)),
        Weight("positions", PREFIX + "wpe.weight", (config.n_positions, h)),
        *norm("attn_norm", block + "ln_1", h),
        *linear("attn.q", block + "attn.c_attn", h, h, heads, layout=part(0, 3, transposed)),
        *linear("attn.k", block + "attn.c_attn", h, h, heads, layout=part(1, 3, transposed)),
        *linear("attn.v", block + "attn.c_attn", h, h, heads, layout=part(2, 3, transposed)),
        *linear("attn.out", block + "attn.c_proj", h, h, rows(config.head_dim), layout=transposed),
        *norm("mlp_norm", block + "ln_2", h),
        *linear("mlp.up", block + "mlp.c_fc", inner, h, columns(), layout=transposed),
        *linear("mlp.down", block + "mlp.c_proj", h, inner, rows(), layout=transposed),
        *norm("final_norm", PREFIX + "ln_f", h),
        *linear("head", PREFIX + "wte" if config.tied else "lm_head", config.vocab_size, h, columns(), bias=False),
    ]


def ignored(config: GPT2Config) -> list[str]:
    causal_masks = r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias"  # that older checkpoints carry along
    return [causal_masks, r"lm_head\.weight"] if config.tied else [causal_masks]
