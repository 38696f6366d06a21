"""Phi-3 for sampling."""

from transformers_neuronx.engine.family import Family
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.models.sampling import ForSampling
from transformers_neuronx.phi3.config import Phi3Config


class Phi3ForSampling(ForSampling):
    """Transformers' `Phi3ForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(Phi3Config.from_hf, weights, graph, prepare=graph.prepare, folder="phi3")
