"""Llama 4, text, for sampling."""

from transformers_neuronx.engine.family import Family
from transformers_neuronx.llama import graph
from transformers_neuronx.llama4text import weights
from transformers_neuronx.llama4text.config import Llama4TextConfig
from transformers_neuronx.llama4text.graph import prepare
from transformers_neuronx.models.sampling import ForSampling


class Llama4TextForSampling(ForSampling):
    """Transformers' `Llama4ForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(Llama4TextConfig.from_hf, weights, graph, prepare=prepare, folder="llama4text")
