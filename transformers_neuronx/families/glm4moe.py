"""GLM-4.5, 4.6 and 4.7: a mixture of experts after a few layers without."""

from dataclasses import dataclass

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import ACTIVATIONS
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.routed import RoutedLike
from transformers_neuronx.models.sampling import ForSampling


@dataclass(frozen=True)
class Glm4MoeConfig(RoutedLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    tied: bool = hf("tie_word_embeddings")
    qkv_bias: bool = hf("attention_bias")
    qk_norm: bool = hf("use_qk_norm")


class Glm4MoeForSampling(ForSampling):
    """Transformers' `Glm4MoeForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(Glm4MoeConfig.from_hf, weights, graph, prepare=graph.prepare, folder="glm4moe")
