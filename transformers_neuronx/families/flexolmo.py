"""FlexOlmo: OLMo 2 with a mixture of experts in every layer."""

from dataclasses import dataclass
from typing import ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import ACTIVATIONS
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.mixture import MixtureLike
from transformers_neuronx.models.sampling import ForSampling


@dataclass(frozen=True)
class FlexOlmoConfig(MixtureLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    attention_bias: bool = hf("attention_bias")
    tied: bool = hf("tie_word_embeddings")
    n_expert: int = hf("num_experts")
    active_experts: int = hf("num_experts_per_tok")
    normalized: bool = hf("norm_topk_prob")

    norms: ClassVar = {"attn_out_norm": "post_attention_layernorm", "mlp_out_norm": "post_feedforward_layernorm"}
    qk_norm = True
    qk_norm_of = "all heads"

    WITHOUT_EFFECT: ClassVar = frozenset({"output_router_logits", "router_aux_loss_coef"})  # for training


class FlexOlmoForSampling(ForSampling):
    """Transformers' `FlexOlmoForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(FlexOlmoConfig.from_hf, weights, graph, prepare=graph.prepare, folder="flexolmo")
