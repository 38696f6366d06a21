"""Arcee (AFM): a feed-forward without a gate."""

from dataclasses import dataclass

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import ACTIVATIONS
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.like import LlamaLike
from transformers_neuronx.models.sampling import ForSampling


@dataclass(frozen=True)
class ArceeConfig(LlamaLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    tied: bool = hf("tie_word_embeddings")
    attention_bias: bool = hf("attention_bias")
    mlp_bias: bool = hf("mlp_bias")

    feed_forward = ("mlp.up_proj", "mlp.down_proj")


class ArceeForSampling(ForSampling):
    """Transformers' `ArceeForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(ArceeConfig.from_hf, weights, graph, prepare=graph.prepare, folder="arcee")
