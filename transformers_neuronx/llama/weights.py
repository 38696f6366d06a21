"""The weight table of LLaMA and the families like it, as their configurations describe it."""

from typing import Any

from transformers_neuronx.llama.feedforward import feed_forward
from transformers_neuronx.llama.hybrid import mixers
from transformers_neuronx.llama.latent import LatentLike, latent_attention
from transformers_neuronx.llama.like import LlamaLike
from transformers_neuronx.weights import (
    COLUMNS,
    Layout,
    Weight,
    as_is,
    attention,
    for_each_head,
    linear,
    norm,
    pairs_as_halves,
    part_per_head,
    parts_of,
    plus_one,
)

PREFIX = "model."
BLOCK = PREFIX + "layers.{}."


def table(config: LlamaLike) -> list[Weight]:
    h = config.hidden_size
    vocabulary, head = (config.vocab_size, h), PREFIX + "embed_tokens" if config.tied else "lm_head"
    attending = latent_attention(config, BLOCK) if isinstance(config, LatentLike) else _attention(config)
    return [
        Weight("embed", PREFIX + "embed_tokens.weight", vocabulary, split=COLUMNS),
        *(row for name, source in config.norms.items() for row in _norm(config, name, BLOCK + source, h)),
        *mixers(config, BLOCK, attending),
        *feed_forward(config, BLOCK),
        *_norm(config, "final_norm", PREFIX + config.final_norm, h),
        Weight("head.weight", head + ".weight", vocabulary, split=COLUMNS),
        *([Weight("head.bias", "lm_head.bias", vocabulary[:1], split=COLUMNS)] if config.head_bias else []),
    ]


def ignored(config: LlamaLike) -> list[str]:
    return [*([r"lm_head\.weight"] if config.tied else []), *config.unread]


def _attention(config: LlamaLike) -> list[Weight]:
    h, heads, biased = config.hidden_size, config.attention_heads, config.attention_bias
    outputs = [count * heads.head_dim for count in (heads.heads, heads.kv_heads, heads.kv_heads)]
    q, k, *others = parts_of(BLOCK, config.projections, [*outputs, h])
    gate = []
    if config.attention_gate:
        (name, _), (first, second) = q, (part_per_head(index, 2, heads.head_dim) for index in range(2))
        gate, q = linear("attn.gate", name, outputs[0], h, heads.split(0), layout=second, bias=biased), (name, first)
    projections = [*((name, _turned(config, layout)) for name, layout in (q, k)), *others]
    return [
        *attention("attn", heads, h, projections, bias=biased or config.qkv_bias, out_bias=biased or config.out_bias),
        *gate,
        *(_norms_of_heads(config) if config.qk_norm else []),
    ]


def _turned(config: LlamaLike, layout: Layout = as_is) -> Layout:
    return pairs_as_halves(config.head_dim, config.rotary.dim, layout) if config.in_pairs else layout


def _norm(config: LlamaLike, name: str, source: str, *sizes: int, **how: Any) -> list[Weight]:
    how = dict(bias=config.norm_bias) | how | (dict(layout=plus_one) if config.norm_plus_one else {})
    return norm(name, source, *sizes, zero_bias=config.layer_norm, **how)


def _norms_of_heads(config: LlamaLike) -> list[Weight]:
    heads, d, turned, rows = config.attention_heads, config.head_dim, _turned(config), []
    for part, count, source in zip("qk", (heads.heads, heads.kv_heads), config.qk_norms, strict=True):
        one = config.qk_norm_of == "every head"
        split = None if one else heads.split(0, keys=part == "k")
        layout = for_each_head(turned) if config.qk_norm_of == "each head" else turned
        how = dict(bias=config.norm_bias and one, layout=layout, split=split, parts=count)
        rows += _norm(config, f"attn.{part}_norm", BLOCK + source, d if one else count * d, **how)
    return rows
