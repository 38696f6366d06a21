"""HunYuan (dense): norms of queries and keys after the rotation."""

from dataclasses import dataclass
from typing import ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import ACTIVATIONS, Rotary
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.like import LlamaLike
from transformers_neuronx.models.sampling import ForSampling


@dataclass(frozen=True)
class HunYuanDenseConfig(LlamaLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    tied: bool = hf("tie_word_embeddings")
    attention_bias: bool = hf("attention_bias")

    qk_norm = True
    qk_norms = ("self_attn.query_layernorm", "self_attn.key_layernorm")
    qk_norm_last = True

    WITHOUT_EFFECT: ClassVar = frozenset({"pretraining_tp", "eod_token_id"})

    @property
    def rotary(self) -> Rotary:
        """With `alpha`, the base is a larger one, and nothing else of the type "dynamic" is read."""
        alpha, dim = self.rope.get("alpha"), self.head_dim
        if not alpha or self.rope.get("rope_type") != "dynamic":
            return self.rotary_with(self.rope)
        return self.rotary_with(dict(rope_theta=self.rope["rope_theta"] * alpha ** (dim / (dim - 2))))


class HunYuanDenseForSampling(ForSampling):
    """Transformers' `HunYuanDenseV1ForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(HunYuanDenseConfig.from_hf, weights, graph, prepare=graph.prepare, folder="hunyuanv1dense")
