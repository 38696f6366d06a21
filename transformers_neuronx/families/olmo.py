"""OLMo: layer norms without weights, and a limit of queries, keys and values."""

import sys
from dataclasses import dataclass, replace
from functools import partial

import torch

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import ACTIVATIONS
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.like import LlamaLike
from transformers_neuronx.models.sampling import ForSampling
from transformers_neuronx.weights import Weight

PREFIX, ignored = weights.PREFIX, weights.ignored


@dataclass(frozen=True)
class OlmoConfig(LlamaLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    tied: bool = hf("tie_word_embeddings")
    attention_bias: bool = hf("attention_bias")
    clip: float | None = hf("clip_qkv", None)
    eps: float = hf("layer_norm_eps", 1e-5, among=[1e-5])  # no attribute of the family: Transformers has the number

    layer_norm = True


def table(config: OlmoConfig) -> list[Weight]:
    """LLaMA's, with ones for the weights of norms."""
    ones = partial(torch.ones, config.hidden_size)
    return [replace(row, value=ones) if row.name.endswith("norm.weight") else row for row in weights.table(config)]


class OlmoForSampling(ForSampling):
    """Transformers' `OlmoForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(OlmoConfig.from_hf, sys.modules[__name__], graph, prepare=graph.prepare, folder="olmo")
