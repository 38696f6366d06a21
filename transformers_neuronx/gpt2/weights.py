"""GPT-2's weight table. Its checkpoints store queries, keys and values in one `Conv1D`, [in, 3 out]."""

from collections.abc import Sequence

from transformers_neuronx.gpt2.config import GPT2Config
from transformers_neuronx.weights import COLUMNS, ROWS, Layout, Weight, attention, linear, norm, part, transposed

PREFIX = "transformer."
FUSED = tuple(("attn.c_attn", part(i, 3, transposed)) for i in range(3))
PROJECTIONS = (*FUSED, ("attn.c_proj", transposed))


def table(
    config: GPT2Config,
    projections: Sequence[tuple[str, Layout]] = PROJECTIONS,
    stored: Layout = transposed,
    qkv_bias: bool = True,
) -> list[Weight]:
    """`projections` are names and layouts of queries, keys, values and output in a layer, `stored` the other layout."""
    h, inner = config.hidden_size, config.inner_size
    block = PREFIX + "h.{}."
    sources = [(block + name, layout) for name, layout in projections]
    return [
        Weight("embed", PREFIX + "wte.weight", (config.vocab_size, h), split=COLUMNS),
        Weight("positions", PREFIX + "wpe.weight", (config.n_positions, h)),
        *norm("attn_norm", block + "ln_1", h),
        *attention("attn", config.attention_heads, h, sources, bias=qkv_bias, out_bias=True),
        *norm("mlp_norm", block + "ln_2", h),
        *linear("mlp.up", block + "mlp.c_fc", inner, h, COLUMNS, layout=stored),
        *linear("mlp.down", block + "mlp.c_proj", h, inner, ROWS, layout=stored),
        *norm("final_norm", PREFIX + "ln_f", h),
        *linear("head", PREFIX + "wte" if config.tied else "lm_head", config.vocab_size, h, COLUMNS, bias=False),
    ]


def ignored(config: GPT2Config) -> list[str]:
    causal_masks = r"(transformer\.)?h\.\d+\.attn\.(attention\.)?(masked_)?bias"  # in older checkpoints
    return [causal_masks, r"lm_head\.weight"] if config.tied else [causal_masks]
