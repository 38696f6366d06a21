"""Granite with a mixture of experts, which are stacked in checkpoints, and maybe a block for all tokens."""

from dataclasses import dataclass
from typing import ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import ACTIVATIONS
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.mixture import MixtureLike
from transformers_neuronx.llama.scaled import ScaledLike
from transformers_neuronx.models.sampling import ForSampling


@dataclass(frozen=True)
class GraniteMoeSharedConfig(ScaledLike, MixtureLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    tied: bool = hf("tie_word_embeddings")
    attention_bias: bool = hf("attention_bias")
    n_expert: int = hf("num_local_experts")
    active_experts: int = hf("num_experts_per_tok")
    shared_size: int = hf("shared_intermediate_size", 0)  # granitemoe has none

    router_name = "block_sparse_moe.router.layer|block_sparse_moe.router"
    of_expert = ()
    of_experts = (
        "block_sparse_moe.input_linear.weight|block_sparse_moe.experts.gate_up_proj",
        "block_sparse_moe.output_linear.weight|block_sparse_moe.experts.down_proj",
    )
    shared = ("shared_mlp.input_linear", "shared_mlp.input_linear", "shared_mlp.output_linear")

    WITHOUT_EFFECT: ClassVar = frozenset({"output_router_logits", "router_aux_loss_coef"})  # for training


class GraniteMoeSharedForSampling(ForSampling):
    """Transformers' `GraniteMoeSharedForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(GraniteMoeSharedConfig.from_hf, weights, graph, prepare=graph.prepare, folder="granitemoeshared")
