"""LLaMA for sampling."""

from transformers_neuronx.engine.family import Family
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.config import LlamaConfig
from transformers_neuronx.models.sampling import ForSampling


class LlamaForSampling(ForSampling):
    """Transformers' `LlamaForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(LlamaConfig.from_hf, weights, graph, prepare=graph.prepare)
