"""GPT-J for sampling."""

from transformers_neuronx.engine.family import Family
from transformers_neuronx.gptj import graph, weights
from transformers_neuronx.gptj.config import GPTJConfig
from transformers_neuronx.models.sampling import ForSampling


class GPTJForSampling(ForSampling):
    """Transformers' `GPTJForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(GPTJConfig.from_hf, weights, graph, prepare=graph.prepare)
