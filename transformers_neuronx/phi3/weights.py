"""Phi-3's weight table. Its checkpoints store queries, keys and values in one layer, and gate and up in another."""

from transformers_neuronx.phi3.config import Phi3Config
from transformers_neuronx.weights import COLUMNS, Weight, as_is, attention, gated_mlp, linear, norm, part, section

PREFIX = "model."


def table(config: Phi3Config) -> list[Weight]:
    h, inner = config.hidden_size, config.inner_size
    block = PREFIX + "layers.{}."
    sizes = tuple(heads * config.head_dim for heads in (config.n_head, config.n_kv_head, config.n_kv_head))
    qkv = [(block + "self_attn.qkv_proj", section(i, sizes)) for i in range(3)]
    out = (block + "self_attn.o_proj", as_is)
    gate_up = [(block + "mlp.gate_up_proj", part(i, 2)) for i in range(2)]
    down = (block + "mlp.down_proj", as_is)
    return [
        Weight("embed", PREFIX + "embed_tokens.weight", (config.vocab_size, h), split=COLUMNS),
        *norm("attn_norm", block + "input_layernorm", h, bias=False),
        *attention("attn", config.attention_heads, h, [*qkv, out], bias=False, out_bias=False),
        *norm("mlp_norm", block + "post_attention_layernorm", h, bias=False),
        *gated_mlp("mlp", [*gate_up, down], inner, h),
        *norm("final_norm", PREFIX + "norm", h, bias=False),
        *linear(
            "head", PREFIX + "embed_tokens" if config.tied else "lm_head", config.vocab_size, h, COLUMNS, bias=False
        ),
    ]


def ignored(config: Phi3Config) -> list[str]:
    return [r"lm_head\.weight"] if config.tied else []
