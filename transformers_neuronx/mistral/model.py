"""Mistral for sampling."""

from transformers_neuronx.engine.family import Family
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.mistral.config import MistralConfig
from transformers_neuronx.models.sampling import ForSampling


class MistralForSampling(ForSampling):
    """Transformers' `MistralForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(MistralConfig.from_hf, weights, graph, prepare=graph.prepare, folder="mistral")
