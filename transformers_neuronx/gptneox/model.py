"""GPT-NeoX for sampling."""

from transformers_neuronx.engine.family import Family
from transformers_neuronx.gptneox import graph, weights
from transformers_neuronx.gptneox.config import GPTNeoXConfig
from transformers_neuronx.models.sampling import ForSampling


class GPTNeoXForSampling(ForSampling):
    """Transformers' `GPTNeoXForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(GPTNeoXConfig.from_hf, weights, graph, prepare=graph.prepare)
