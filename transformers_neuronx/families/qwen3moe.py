"""Qwen3 with a mixture of experts in every layer."""

from dataclasses import dataclass
from typing import ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import ACTIVATIONS
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.like import LlamaLike
from transformers_neuronx.models.sampling import ForSampling


@dataclass(frozen=True)
class Qwen3MoeConfig(LlamaLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    inner_size: int = hf("moe_intermediate_size")
    head_dim: int = hf("head_dim")
    attention_bias: bool = hf("attention_bias")
    tied: bool = hf("tie_word_embeddings")
    window: int | None = hf("sliding_window", None)
    n_expert: int = hf("num_local_experts")
    active_experts: int = hf("num_experts_per_tok")
    normalized: bool = hf("norm_topk_prob")

    qk_norm = True

    # Layers without experts would have intermediate_size. sliding_window follows from others; the rest is for training.
    FIXED: ClassVar = {"decoder_sparse_step": 1, "mlp_only_layers": []}
    WITHOUT_EFFECT: ClassVar = frozenset(
        {
            "intermediate_size", "use_sliding_window", "max_window_layers", "output_router_logits",
            "router_aux_loss_coef",
        }
    )  # fmt: skip


class Qwen3MoeForSampling(ForSampling):
    """Transformers' `Qwen3MoeForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(Qwen3MoeConfig.from_hf, weights, graph, prepare=graph.prepare, folder="qwen3moe")
