"""Qwen3-Next: Qwen 3.5 with experts, other names, and the projections of a gated delta net in two matrices."""

from dataclasses import dataclass
from typing import ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import ACTIVATIONS
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.delta import DeltaNetLike
from transformers_neuronx.llama.hybrid import HYBRID_KINDS
from transformers_neuronx.llama.mixture import MixtureLike
from transformers_neuronx.models.sampling import ForSampling


@dataclass(frozen=True)
class Qwen3NextConfig(DeltaNetLike, MixtureLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    tied: bool = hf("tie_word_embeddings")
    attention_bias: bool = hf("attention_bias")
    attention_kinds: list[str] = hf("layer_types", among=HYBRID_KINDS)
    n_expert: int = hf("num_experts")
    active_experts: int = hf("num_experts_per_tok")
    expert_size: int = hf("moe_intermediate_size")
    shared_size: int = hf("shared_expert_intermediate_size")
    normalized: bool = hf("norm_topk_prob")
    sparse_step: int = hf("decoder_sparse_step")
    dense_too: list[int] = hf("mlp_only_layers")

    shared = tuple(f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down"))
    shared_gate = "mlp.shared_expert_gate"
    delta_projections = (*("linear_attn.in_proj_qkvz",) * 4, *("linear_attn.in_proj_ba",) * 2)
    delta_by_head = True

    # layer_types follows from the first; the rest is for training.
    WITHOUT_EFFECT: ClassVar = frozenset({"full_attention_interval", "output_router_logits", "router_aux_loss_coef"})


class Qwen3NextForSampling(ForSampling):
    """Transformers' `Qwen3NextForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(Qwen3NextConfig.from_hf, weights, graph, prepare=graph.prepare, folder="qwen3next")
