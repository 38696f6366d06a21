"""GLM-4.7 Flash: latent attention, and a mixture of experts in most layers."""

from dataclasses import dataclass
from typing import ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import ACTIVATIONS
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.latent import LatentLike
from transformers_neuronx.llama.routed import RoutedLike
from transformers_neuronx.models.sampling import ForSampling


@dataclass(frozen=True)
class Glm4MoeLiteConfig(LatentLike, RoutedLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    tied: bool = hf("tie_word_embeddings")
    in_pairs: bool = hf("rope_interleave", True)
    blocks: list[str] = hf("mlp_layer_types", among=("dense", "sparse"))

    FIXED: ClassVar = {"first_k_dense_replace": 1}  # Transformers reads mlp_layer_types alone, by default the same
    WITHOUT_EFFECT: ClassVar = frozenset({"pretraining_tp"})


class Glm4MoeLiteForSampling(ForSampling):
    """Transformers' `Glm4MoeLiteForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(Glm4MoeLiteConfig.from_hf, weights, graph, prepare=graph.prepare, folder="glm4moelite")
