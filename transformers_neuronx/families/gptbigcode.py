"""GPT-BigCode (StarCoder, SantaCoder): GPT-2's graph, with one head of keys and values, or one for each of queries."""

import sys
from dataclasses import dataclass
from typing import ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.gpt2 import graph, weights
from transformers_neuronx.gpt2.config import GPT2Config
from transformers_neuronx.models.sampling import ForSampling
from transformers_neuronx.weights import Heads, Weight, as_is, part_per_head, section

PREFIX, ignored = weights.PREFIX, weights.ignored


@dataclass(frozen=True)
class GPTBigCodeConfig(GPT2Config):
    multi_query: bool = hf("multi_query")

    # Scores and their softmax are always f32 here. The number of heads of keys follows from multi_query.
    WITHOUT_EFFECT: ClassVar = frozenset(
        {"attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "num_key_value_heads"}
    )

    @property
    def attention_heads(self) -> Heads:
        return Heads(self.n_head, 1 if self.multi_query else self.n_head, self.hidden_size // self.n_head)


def table(config: GPTBigCodeConfig) -> list[Weight]:
    """GPT-2's, with `Linear` layers."""
    d = config.attention_heads.head_dim
    sizes = (config.hidden_size, d, d)
    parts = [section(i, sizes) if config.multi_query else part_per_head(i, 3, d) for i in range(3)]
    return weights.table(config, [*(("attn.c_attn", each) for each in parts), ("attn.c_proj", as_is)], as_is)


class GPTBigCodeForSampling(ForSampling):
    """Transformers' `GPTBigCodeForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(GPTBigCodeConfig.from_hf, sys.modules[__name__], graph, folder="gptbigcode")
