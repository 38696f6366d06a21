"""OLMo 3: OLMo 2 with windows in most layers, where positions are not stretched."""

from dataclasses import dataclass
from typing import ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import ACTIVATIONS, LAYER_KINDS, Rotary
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.like import LlamaLike
from transformers_neuronx.models.sampling import ForSampling


@dataclass(frozen=True)
class Olmo3Config(LlamaLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    tied: bool = hf("tie_word_embeddings")
    attention_bias: bool = hf("attention_bias")
    layer_kinds: list[str] = hf("layer_types", among=LAYER_KINDS)
    window: int | None = hf("sliding_window", None)

    norms: ClassVar = {"attn_out_norm": "post_attention_layernorm", "mlp_out_norm": "post_feedforward_layernorm"}
    qk_norm = True
    qk_norm_of = "all heads"

    @property
    def rotary(self) -> Rotary:
        return self.rotary_of("full_attention")

    def rotary_of(self, kind: str) -> Rotary:
        return self.rotary_with(self.rope[kind])


class Olmo3ForSampling(ForSampling):
    """Transformers' `Olmo3ForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(Olmo3Config.from_hf, weights, graph, prepare=graph.prepare, folder="olmo3")
