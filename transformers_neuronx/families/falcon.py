"""Falcon: layer norms, and attention parallel to the feed-forward; queries, keys and values are one layer."""

import sys
from dataclasses import dataclass, replace
from typing import ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import ACTIVATIONS
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.like import LlamaLike
from transformers_neuronx.models.sampling import ForSampling
from transformers_neuronx.weights import Heads, Weight, renamed, section_per_head

PREFIX, ignored = "transformer.", weights.ignored
NAMES = {weights.BLOCK: "transformer.h.{}.", "model.embed_tokens": "transformer.word_embeddings", "model.": PREFIX}


@dataclass(frozen=True)
class FalconConfig(LlamaLike):
    n_kv_head: int = hf("num_kv_heads")
    inner_size: int = hf("ffn_hidden_size")
    eps: float = hf("layer_norm_epsilon")
    activation: str = hf("activation", among=ACTIVATIONS)
    tied: bool = hf("tie_word_embeddings")
    attention_bias: bool = hf("bias")
    mlp_bias: bool = hf("bias")
    parallel: bool = hf("parallel_attn")
    multi_query: bool = hf("multi_query")
    grouped: bool = hf("new_decoder_architecture")
    parallel_norms: int = hf("num_ln_in_parallel_attn", lambda given: 2 if given["new_decoder_architecture"] else 1)

    layer_norm = norm_bias = True
    final_norm = "ln_f"
    projections = (*["self_attention.query_key_value"] * 3, "self_attention.dense")
    feed_forward = ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h")

    # Transformers rounds what ALiBi adds to a score to 8 bits, by position, so it does not follow from distances.
    FIXED: ClassVar = {"alibi": False}

    @property
    def attention_heads(self) -> Heads:
        return Heads(self.n_head, self.n_kv_head if self.grouped or not self.multi_query else 1, self.head_dim)

    @property
    def norms(self) -> dict[str, str]:  # type: ignore[override]
        if self.grouped and self.parallel_norms == 2:
            return {"attn_norm": "ln_attn", "mlp_norm": "ln_mlp"}
        return {"attn_norm": "input_layernorm"} | ({} if self.parallel else {"mlp_norm": "post_attention_layernorm"})


def table(config: FalconConfig) -> list[Weight]:
    """LLaMA's with other names, and parts of one layer."""
    d = config.head_dim
    sizes = config.attention_heads.group * d, d, d  # the queries of a group, and the key and the value that they share
    layouts = {f"attn.{part}": section_per_head(i, sizes) for i, part in enumerate("qkv")}
    rows = renamed(weights.table(config), NAMES)
    return [replace(row, layout=layouts.get(row.name.rpartition(".")[0], row.layout)) for row in rows]


class FalconForSampling(ForSampling):
    """Transformers' `FalconForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(FalconConfig.from_hf, sys.modules[__name__], graph, prepare=graph.prepare, folder="falcon")
