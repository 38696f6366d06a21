"""Qwen3 with a mixture of experts, in layers with LLaMA's feed-forward or without."""

from dataclasses import dataclass
from typing import ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import ACTIVATIONS
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.mixture import MixtureLike
from transformers_neuronx.models.sampling import ForSampling


@dataclass(frozen=True)
class Qwen3MoeConfig(MixtureLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    attention_bias: bool = hf("attention_bias")
    tied: bool = hf("tie_word_embeddings")
    window: int | None = hf("sliding_window", None)
    n_expert: int = hf("num_local_experts")
    active_experts: int = hf("num_experts_per_tok")
    expert_size: int = hf("moe_intermediate_size")
    normalized: bool = hf("norm_topk_prob")
    sparse_step: int = hf("decoder_sparse_step")
    dense_too: list[int] = hf("mlp_only_layers")

    qk_norm = True

    # sliding_window follows from others; the rest is for training.
    WITHOUT_EFFECT: ClassVar = frozenset(
        {"use_sliding_window", "max_window_layers", "output_router_logits", "router_aux_loss_coef"}
    )


class Qwen3MoeForSampling(ForSampling):
    """Transformers' `Qwen3MoeForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(Qwen3MoeConfig.from_hf, weights, graph, prepare=graph.prepare, folder="qwen3moe")
