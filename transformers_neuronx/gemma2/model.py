"""Gemma 2 for sampling."""

from transformers_neuronx.engine.family import Family
from transformers_neuronx.gemma2.config import Gemma2Config
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.models.sampling import ForSampling


class Gemma2ForSampling(ForSampling):
    """Transformers' `Gemma2ForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(Gemma2Config.from_hf, weights, graph, prepare=graph.prepare, folder="gemma2")
