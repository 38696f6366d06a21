"""BLOOM for sampling."""

from transformers_neuronx.bloom import graph, weights
from transformers_neuronx.bloom.config import BloomConfig
from transformers_neuronx.engine.family import Family
from transformers_neuronx.models.sampling import ForSampling


class BloomForSampling(ForSampling):
    """Transformers' `BloomForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(BloomConfig.from_hf, weights, graph)
