"""Latent attention in LLaMA's block: its configuration, and its rows."""

import math
from dataclasses import dataclass
from typing import ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.llama.like import LlamaLike
from transformers_neuronx.weights import (
    COLUMNS,
    Heads,
    Layout,
    Weight,
    as_is,
    linear,
    norm,
    pairs_as_halves,
    section_per_head,
)


@dataclass(frozen=True)
class LatentLike(LlamaLike):
    """A configuration with latent attention. `head_dim` is that of the part of heads that rotates."""

    attention_bias: bool = hf("attention_bias")
    head_dim: int = hf("qk_rope_head_dim")
    fixed_dim: int = hf("qk_nope_head_dim")
    value_dim: int = hf("v_head_dim")
    rank: int = hf("kv_lora_rank")
    query_rank: int | None = hf("q_lora_rank", None)

    # All heads share one key. The others follow from those above.
    WITHOUT_EFFECT: ClassVar = frozenset({"num_key_value_heads", "head_dim", "qk_head_dim"})

    @property
    def attention_heads(self) -> Heads:
        return Heads(self.n_head, 1, self.rank + self.head_dim, latent=True)

    @property
    def attention_scale(self) -> float:  # type: ignore[override]
        """Stretched positions make scores larger, by the square of YaRN's factor."""
        factor, rope = 1.0, self.rotary
        if rope.kind != "default" and (share := rope.of("mscale_all_dim", 0)):
            factor = max(1.0, 0.1 * share * math.log(rope.of("factor")) + 1)
        return factor**2 / math.sqrt(self.fixed_dim + self.head_dim)


def latent_attention(config: LatentLike, block: str) -> list[Weight]:
    """The rows of latent attention. Names in the checkpoint begin with `block`."""
    h, heads, bias, own = config.hidden_size, config.attention_heads, config.attention_bias, block + "self_attn."
    turned, fixed, values, rank = config.head_dim, config.fixed_dim, config.value_dim, config.rank
    query, name, inputs = fixed + turned, "q_proj", h

    def turned_last(size: int) -> Layout:
        return pairs_as_halves(size, turned, first=size - turned) if config.in_pairs else as_is

    rows = linear(
        "attn.kv_a", own + "kv_a_proj_with_mqa", rank + turned, h, COLUMNS, layout=turned_last(rank + turned), bias=bias
    )
    rows += norm("attn.kv_norm", own + "kv_a_layernorm", rank, bias=False)
    if config.query_rank:
        name, inputs = "q_b_proj", config.query_rank
        rows += linear("attn.q_a", own + "q_a_proj", inputs, h, COLUMNS, bias=bias)
        rows += norm("attn.q_norm", own + "q_a_layernorm", inputs, bias=False)
    split = heads.split(0, unit=query)
    rows += linear("attn.q_b", own + name, heads.heads * query, inputs, split, layout=turned_last(query), bias=False)
    for index, (part, size) in enumerate([("up_k", fixed), ("up_v", values)]):
        how = section_per_head(index, (fixed, values)), heads.split(0, unit=size)
        rows.append(Weight(f"attn.{part}", own + "kv_b_proj.weight", (heads.heads * size, rank), *how))
    return rows + linear("attn.out", own + "o_proj", h, heads.heads * values, heads.split(1, unit=values), bias=bias)
