"""GPT-J's weight table. Its features rotate in neighbouring pairs; a layout of queries and keys makes them halves."""

from transformers_neuronx.gptj.config import GPTJConfig
from transformers_neuronx.weights import COLUMNS, ROWS, Weight, as_is, attention, linear, norm, pairs_as_halves

PREFIX = "transformer."


def table(config: GPTJConfig) -> list[Weight]:
    h, inner, vocab = config.hidden_size, config.inner_size, config.vocab_size
    heads = config.attention_heads
    block = PREFIX + "h.{}."
    turned = pairs_as_halves(heads.head_dim, config.rotary_dim)
    layouts = {"q": turned, "k": turned, "v": as_is, "out": as_is}
    projections = [(f"{block}attn.{name}_proj", layout) for name, layout in layouts.items()]
    return [
        Weight("embed", PREFIX + "wte.weight", (vocab, h), split=COLUMNS),
        *norm("norm", block + "ln_1", h),
        *attention("attn", heads, h, projections, bias=False, out_bias=False),
        *linear("mlp.up", block + "mlp.fc_in", inner, h, COLUMNS),
        *linear("mlp.down", block + "mlp.fc_out", h, inner, ROWS),
        *norm("final_norm", PREFIX + "ln_f", h),
        Weight("head.weight", PREFIX + "wte.weight" if config.tied else "lm_head.weight", (vocab, h), split=COLUMNS),
        Weight("head.bias", "lm_head.bias", (vocab,), split=COLUMNS),
    ]


def ignored(config: GPTJConfig) -> list[str]:
    causal_masks = r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias"  # in older checkpoints
    return [causal_masks, r"lm_head\.weight"] if config.tied else [causal_masks]
