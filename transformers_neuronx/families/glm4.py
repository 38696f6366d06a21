"""GLM-4 (0414): GLM with norms after both blocks, too."""

from dataclasses import dataclass
from typing import ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import ACTIVATIONS
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.like import LlamaLike
from transformers_neuronx.models.sampling import ForSampling


@dataclass(frozen=True)
class Glm4Config(LlamaLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    tied: bool = hf("tie_word_embeddings")
    qkv_bias: bool = hf("attention_bias")

    in_pairs = True
    feed_forward = ("mlp.gate_up_proj", "mlp.gate_up_proj", "mlp.down_proj")
    norms: ClassVar = {
        "attn_norm": "input_layernorm",
        "attn_out_norm": "post_self_attn_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "mlp_out_norm": "post_mlp_layernorm",
    }


class Glm4ForSampling(ForSampling):
    """Transformers' `Glm4ForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(Glm4Config.from_hf, weights, graph, prepare=graph.prepare, folder="glm4")
