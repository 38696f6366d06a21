"""Mixtures with the attributes of DeepSeek-V3: experts in groups, shared ones, and a few first layers without."""

from dataclasses import dataclass
from typing import ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.llama.mixture import MixtureLike


@dataclass(frozen=True)
class RoutedLike(MixtureLike):
    """A `MixtureLike` whose configuration has the names of DeepSeek-V3's (DeepSeek-AI, arXiv:2412.19437)."""

    n_expert: int = hf("n_routed_experts")
    active_experts: int = hf("num_experts_per_tok")
    expert_size: int = hf("moe_intermediate_size")
    n_shared: int = hf("n_shared_experts")
    normalized: bool = hf("norm_topk_prob", False)
    routed_scale: float = hf("routed_scaling_factor")
    groups: int = hf("n_group", 1)
    active_groups: int = hf("topk_group", 1)
    first_dense: int = hf("first_k_dense_replace", 0)
    guesses: int = hf("num_nextn_predict_layers", 0)

    sigmoid = True
    correction = "mlp.gate.e_score_correction_bias"

    WITHOUT_EFFECT: ClassVar = frozenset({"output_router_logits"})
