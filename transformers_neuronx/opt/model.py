"""OPT for sampling."""

from transformers_neuronx.engine.family import Family
from transformers_neuronx.models.sampling import ForSampling
from transformers_neuronx.opt import graph, weights
from transformers_neuronx.opt.config import OPTConfig


class OPTForSampling(ForSampling):
    """Transformers' `OPTForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(OPTConfig.from_hf, weights, graph)
