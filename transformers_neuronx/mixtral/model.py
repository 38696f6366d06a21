"""Mixtral for sampling."""

from transformers_neuronx.engine.family import Family
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.mixtral.config import MixtralConfig
from transformers_neuronx.models.sampling import ForSampling


class MixtralForSampling(ForSampling):
    """Transformers' `MixtralForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(MixtralConfig.from_hf, weights, graph, prepare=graph.prepare, folder="mixtral")
