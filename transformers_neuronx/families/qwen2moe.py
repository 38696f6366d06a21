"""Qwen2 with a mixture of experts, and a gated block for all tokens."""

from dataclasses import dataclass
from typing import ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import ACTIVATIONS, LAYER_KINDS
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.mixture import MixtureLike
from transformers_neuronx.models.sampling import ForSampling


@dataclass(frozen=True)
class Qwen2MoeConfig(MixtureLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    tied: bool = hf("tie_word_embeddings")
    qkv_bias: bool = hf("qkv_bias")
    attention_kinds: list[str] = hf("layer_types", among=LAYER_KINDS)
    window: int | None = hf("sliding_window", None)
    n_expert: int = hf("num_experts")
    active_experts: int = hf("num_experts_per_tok")
    expert_size: int = hf("moe_intermediate_size")
    normalized: bool = hf("norm_topk_prob")
    shared_size: int = hf("shared_expert_intermediate_size")
    sparse_step: int = hf("decoder_sparse_step")
    dense_too: list[int] = hf("mlp_only_layers")

    shared = tuple(f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down"))
    shared_gate = "mlp.shared_expert_gate"

    # layer_types follows from the first two; the rest is for training.
    WITHOUT_EFFECT: ClassVar = frozenset(
        {"use_sliding_window", "max_window_layers", "output_router_logits", "router_aux_loss_coef"}
    )


class Qwen2MoeForSampling(ForSampling):
    """Transformers' `Qwen2MoeForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(Qwen2MoeConfig.from_hf, weights, graph, prepare=graph.prepare, folder="qwen2moe")
