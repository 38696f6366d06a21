"""GPT-NeoX for sampling."""

from transformers_neuronx.gptneox import graph, weights
from transformers_neuronx.gptneox.config import GPTNeoXConfig
from transformers_neuronx.programs import Family
from transformers_neuronx.sampling import ForSampling


class GPTNeoXForSampling(ForSampling):
    """Transformers' `GPTNeoXForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(GPTNeoXConfig.from_hf, weights, graph)
