"""Solar Open: GLM-4.5 with experts in every layer, in which all features rotate."""

from dataclasses import dataclass
from typing import ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import ACTIVATIONS
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.routed import RoutedLike
from transformers_neuronx.models.sampling import ForSampling


@dataclass(frozen=True)
class SolarOpenConfig(RoutedLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    inner_size: int = hf("moe_intermediate_size")
    head_dim: int = hf("head_dim")
    tied: bool = hf("tie_word_embeddings")
    qkv_bias: bool = hf("attention_bias")

    # Every layer has experts.
    FIXED: ClassVar = {"first_k_dense_replace": 0}
    WITHOUT_EFFECT: ClassVar = frozenset({"intermediate_size"})


class SolarOpenForSampling(ForSampling):
    """Transformers' `SolarOpenForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(SolarOpenConfig.from_hf, weights, graph, prepare=graph.prepare, folder="solaropen")
