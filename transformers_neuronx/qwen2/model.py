"""Qwen2 for sampling."""

from transformers_neuronx.engine.family import Family
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.models.sampling import ForSampling
from transformers_neuronx.qwen2.config import Qwen2Config


class Qwen2ForSampling(ForSampling):
    """Transformers' `Qwen2ForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(Qwen2Config.from_hf, weights, graph, prepare=graph.prepare, folder="qwen2")
