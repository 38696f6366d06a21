"""Qwen3 for sampling."""

from transformers_neuronx.engine.family import Family
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.models.sampling import ForSampling
from transformers_neuronx.qwen3.config import Qwen3Config


class Qwen3ForSampling(ForSampling):
    """Transformers' `Qwen3ForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(Qwen3Config.from_hf, weights, graph, prepare=graph.prepare, folder="qwen3")
