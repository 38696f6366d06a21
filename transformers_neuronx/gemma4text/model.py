"""Gemma 4, text, for sampling."""

from transformers_neuronx.engine.family import Family
from transformers_neuronx.gemma4text import graph, weights
from transformers_neuronx.gemma4text.config import Gemma4TextConfig
from transformers_neuronx.models.sampling import ForSampling


class Gemma4TextForSampling(ForSampling):
    """Transformers' `Gemma4ForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(Gemma4TextConfig.from_hf, weights, graph, prepare=graph.prepare)
