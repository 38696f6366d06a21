"""Cohere (Command R): one layer norm without a bias before attention and feed-forward, which are parallel."""

from dataclasses import dataclass
from typing import ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import ACTIVATIONS
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.like import LlamaLike
from transformers_neuronx.models.sampling import ForSampling


@dataclass(frozen=True)
class CohereConfig(LlamaLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    tied: bool = hf("tie_word_embeddings")
    eps: float = hf("layer_norm_eps")
    attention_bias: bool = hf("attention_bias")
    logit_scale: float = hf("logit_scale")
    qk_norm: bool = hf("use_qk_norm", False)

    parallel = True
    in_pairs = True
    norms: ClassVar = {"attn_norm": "input_layernorm"}
    layer_norm = True
    qk_norm_of = "each head"


class CohereForSampling(ForSampling):
    """Transformers' `CohereForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(CohereConfig.from_hf, weights, graph, prepare=graph.prepare, folder="cohere")
