"""Youtu-LLM: LLaMA with latent attention."""

from dataclasses import dataclass
from typing import ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import ACTIVATIONS
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.latent import LatentLike
from transformers_neuronx.models.sampling import ForSampling


@dataclass(frozen=True)
class YoutuConfig(LatentLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    tied: bool = hf("tie_word_embeddings")
    in_pairs: bool = hf("rope_interleave", True)

    WITHOUT_EFFECT: ClassVar = frozenset({"embedding_initializer_range"})


class YoutuForSampling(ForSampling):
    """Transformers' `YoutuForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(YoutuConfig.from_hf, weights, graph, prepare=graph.prepare, folder="youtu")
