"""Hy3: Qwen3 with a mixture of experts after a first layer without, and shared experts."""

import sys
from dataclasses import dataclass
from typing import ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import ACTIVATIONS
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.mixture import MixtureLike
from transformers_neuronx.models.sampling import ForSampling
from transformers_neuronx.weights import Weight, also_named

PREFIX, ignored = weights.PREFIX, weights.ignored


@dataclass(frozen=True)
class HYV3Config(MixtureLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    attention_bias: bool = hf("attention_bias")
    mlp_bias: bool = hf("mlp_bias")
    tied: bool = hf("tie_word_embeddings")
    n_expert: int = hf("num_experts")
    active_experts: int = hf("num_experts_per_tok")
    expert_size: int = hf("moe_intermediate_size")
    n_shared: int = hf("num_shared_experts")
    routed_scale: float = hf("router_scaling_factor")
    blocks: list[str] = hf("mlp_layer_types", among=("dense", "sparse"))
    guesses: int = hf("num_nextn_predict_layers", 0)

    qk_norm = True
    sigmoid = True
    router_name = "mlp.gate|mlp.router.gate"
    correction = "mlp.e_score_correction_bias|mlp.expert_bias"

    # Transformers reads mlp_layer_types, which say the same by default.
    FIXED: ClassVar = {"first_k_dense_replace": 1}
    # In half precision, a sum of two tensors is that of f32, rounded, with enable_moe_fp32_combine or without.
    WITHOUT_EFFECT: ClassVar = frozenset({"enable_moe_fp32_combine", "output_router_logits"})


def table(config: HYV3Config) -> list[Weight]:
    return also_named(weights.table(config), {"mlp.shared_experts": "mlp.shared_mlp"})


class HYV3ForSampling(ForSampling):
    """Transformers' `HYV3ForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(HYV3Config.from_hf, sys.modules[__name__], graph, prepare=graph.prepare, folder="hyv3")
