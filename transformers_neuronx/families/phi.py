"""Phi: one layer norm before attention and feed-forward, which are parallel; biases everywhere."""

from dataclasses import dataclass
from typing import ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import ACTIVATIONS
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.like import LlamaLike
from transformers_neuronx.models.sampling import ForSampling


@dataclass(frozen=True)
class PhiConfig(LlamaLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    tied: bool = hf("tie_word_embeddings")
    eps: float = hf("layer_norm_eps")
    qk_norm: bool = hf("qk_layernorm")

    parallel = True
    norms: ClassVar = {"attn_norm": "input_layernorm"}
    final_norm = "final_layernorm"
    layer_norm = True
    norm_bias = True
    qk_norms = ("self_attn.q_layernorm", "self_attn.k_layernorm")
    projections = (*(f"self_attn.{part}_proj" for part in "qkv"), "self_attn.dense")
    feed_forward = ("mlp.fc1", "mlp.fc2")
    attention_bias = True
    mlp_bias = True
    head_bias = True


class PhiForSampling(ForSampling):
    """Transformers' `PhiForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(PhiConfig.from_hf, weights, graph, prepare=graph.prepare, folder="phi")
