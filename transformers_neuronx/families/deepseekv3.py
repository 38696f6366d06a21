"""DeepSeek-V3 and R1, Kimi K2: latent attention, and a mixture of experts after a few layers without."""

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
class DeepseekV3Config(LatentLike, RoutedLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    tied: bool = hf("tie_word_embeddings")
    in_pairs: bool = hf("rope_interleave", True)

    WITHOUT_EFFECT: ClassVar = frozenset({"pretraining_tp"})


class DeepseekV3ForSampling(ForSampling):
    """Transformers' `DeepseekV3ForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(DeepseekV3Config.from_hf, weights, graph, prepare=graph.prepare, folder="deepseekv3")
