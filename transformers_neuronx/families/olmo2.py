"""OLMo 2: norms after the blocks, and of the queries and keys of all heads together."""

from dataclasses import dataclass
from typing import ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import ACTIVATIONS
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.like import LlamaLike
from transformers_neuronx.models.sampling import ForSampling


@dataclass(frozen=True)
class Olmo2Config(LlamaLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    tied: bool = hf("tie_word_embeddings")
    attention_bias: bool = hf("attention_bias")

    norms: ClassVar = {"attn_out_norm": "post_attention_layernorm", "mlp_out_norm": "post_feedforward_layernorm"}
    qk_norm = True
    qk_norm_of = "all heads"


class Olmo2ForSampling(ForSampling):
    """Transformers' `Olmo2ForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(Olmo2Config.from_hf, weights, graph, prepare=graph.prepare, folder="olmo2")
