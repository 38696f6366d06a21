"""Seed-OSS: biases of queries, keys and values, and of the output if it is said."""

from dataclasses import dataclass
from typing import ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import ACTIVATIONS
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.like import LlamaLike
from transformers_neuronx.models.sampling import ForSampling


@dataclass(frozen=True)
class SeedOssConfig(LlamaLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    tied: bool = hf("tie_word_embeddings")
    qkv_bias: bool = hf("attention_bias")
    out_bias: bool = hf("attention_out_bias")
    mlp_bias: bool = hf("mlp_bias")

    WITHOUT_EFFECT: ClassVar = frozenset({"pretraining_tp", "residual_dropout"})


class SeedOssForSampling(ForSampling):
    """Transformers' `SeedOssForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(SeedOssConfig.from_hf, weights, graph, prepare=graph.prepare, folder="seedoss")
