"""ERNIE 4.5: features rotate in pairs."""

from dataclasses import dataclass

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import ACTIVATIONS
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.like import LlamaLike
from transformers_neuronx.models.sampling import ForSampling


@dataclass(frozen=True)
class Ernie45Config(LlamaLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    tied: bool = hf("tie_word_embeddings")
    attention_bias: bool = hf("use_bias", False)
    mlp_bias: bool = hf("use_bias", False)

    in_pairs = True


class Ernie45ForSampling(ForSampling):
    """Transformers' `Ernie4_5ForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(Ernie45Config.from_hf, weights, graph, prepare=graph.prepare, folder="ernie45")
