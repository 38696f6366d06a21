"""GPT-J's weight table. Its features rotate in neighbouring pairs; a layout of queries and keys makes them halves."""

from collections.abc import Sequence

from transformers_neuronx.gptj.config import GPTJConfig
from transformers_neuronx.weights import COLUMNS, ROWS, Layout, Weight, as_is, attention, linear, norm, pairs_as_halves

PREFIX = "transformer."
PROJECTIONS = tuple((f"attn.{name}_proj", as_is) for name in ("q", "k", "v", "out"))


def table(config: GPTJConfig, projections: Sequence[tuple[str, Layout]] = PROJECTIONS) -> list[Weight]:
    """`projections` are names and layouts of queries, keys, values and output in a layer."""
    h, inner, vocab = config.hidden_size, config.inner_size, config.vocab_size
    heads = config.attention_heads
    block = PREFIX + "h.{}."
    q, k, *others = [(block + name, layout) for name, layout in projections]
    turned = [(name, pairs_as_halves(heads.head_dim, config.rotary_dim, layout)) for name, layout in (q, k)]
    return [
        Weight("embed", PREFIX + "wte.weight", (vocab, h), split=COLUMNS),
        *norm("norm", block + "ln_1", h),
        *attention("attn", heads, h, [*turned, *others], bias=False, out_bias=False),
        *linear("mlp.up", block + "mlp.fc_in", inner, h, COLUMNS),
        *linear("mlp.down", block + "mlp.fc_out", h, inner, ROWS),
        *norm("final_norm", PREFIX + "ln_f", h),
        Weight("head.weight", PREFIX + "wte.weight" if config.tied else "lm_head.weight", (vocab, h), split=COLUMNS),
        Weight("head.bias", "lm_head.bias", (vocab,), split=COLUMNS),
    ]


def ignored(config: GPTJConfig) -> list[str]:
    causal_masks = r"(transformer\.)?h\.\d+\.attn\.((masked_)?bias|causal_mask)"  # in older checkpoints
    return [causal_masks, r"lm_head\.weight"] if config.tied else [causal_masks]
