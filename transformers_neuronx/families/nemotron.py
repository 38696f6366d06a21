"""Nemotron, Minitron: layer norms of one plus their weight, and a feed-forward without a gate."""

from dataclasses import dataclass

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import ACTIVATIONS
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.like import LlamaLike
from transformers_neuronx.models.sampling import ForSampling


@dataclass(frozen=True)
class NemotronConfig(LlamaLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    tied: bool = hf("tie_word_embeddings")
    eps: float = hf("norm_eps")
    attention_bias: bool = hf("attention_bias")
    mlp_bias: bool = hf("mlp_bias")

    layer_norm = True
    norm_bias = True
    norm_plus_one = True
    feed_forward = ("mlp.up_proj", "mlp.down_proj")


class NemotronForSampling(ForSampling):
    """Transformers' `NemotronForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(NemotronConfig.from_hf, weights, graph, prepare=graph.prepare, folder="nemotron")
