"""OLMoE: LLaMA with norms of all queries and keys together, and a mixture of experts in every layer."""

from dataclasses import dataclass
from typing import ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import ACTIVATIONS
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.mixture import MixtureLike
from transformers_neuronx.models.sampling import ForSampling


@dataclass(frozen=True)
class OlmoeConfig(MixtureLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    attention_bias: bool = hf("attention_bias")
    tied: bool = hf("tie_word_embeddings")
    n_expert: int = hf("num_experts")
    active_experts: int = hf("num_experts_per_tok")
    normalized: bool = hf("norm_topk_prob")

    qk_norm = True
    qk_norm_of = "all heads"

    FIXED: ClassVar = {"clip_qkv": None}
    WITHOUT_EFFECT: ClassVar = frozenset({"output_router_logits", "router_aux_loss_coef"})


class OlmoeForSampling(ForSampling):
    """Transformers' `OlmoeForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(OlmoeConfig.from_hf, weights, graph, prepare=graph.prepare, folder="olmoe")
