"""GPT-J for sampling."""

from transformers_neuronx.gptj import graph, weights
from transformers_neuronx.gptj.config import GPTJConfig
from transformers_neuronx.programs import Family
from transformers_neuronx.sampling import ForSampling


class GPTJForSampling(ForSampling):
    family = Family(GPTJConfig.from_hf, weights, graph)
