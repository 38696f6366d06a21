"""Granite MoE SWA (granite-swash): Granite SWA with experts, which are stacked, and maybe a block for all tokens."""

from dataclasses import dataclass
from typing import ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import ACTIVATIONS, LAYER_KINDS
from transformers_neuronx.llama import bases, graph
from transformers_neuronx.llama.bases import BasesLike
from transformers_neuronx.llama.mixture import MixtureLike
from transformers_neuronx.models.sampling import ForSampling


@dataclass(frozen=True)
class GraniteMoeSWAConfig(BasesLike, MixtureLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    tied: bool = hf("tie_word_embeddings")
    attention_bias: bool = hf("attention_bias")
    n_expert: int = hf("num_local_experts")
    active_experts: int = hf("num_experts_per_tok")
    shared_size: int = hf("shared_intermediate_size")
    kinds: list[str] = hf("layer_types", among=LAYER_KINDS)
    bases: list[float] = hf("layer_rope_theta")  # 0 for layers that do not rotate
    window: int | None = hf("sliding_window", None)

    router_name = "block_sparse_moe.router"
    of_expert = ()
    of_experts = ("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj")
    shared = ("shared_mlp.input_linear", "shared_mlp.input_linear", "shared_mlp.output_linear")

    WITHOUT_EFFECT: ClassVar = frozenset({"output_router_logits", "router_aux_loss_coef"})  # for training


class GraniteMoeSWAForSampling(ForSampling):
    """Transformers' `GraniteMoeSWAForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(GraniteMoeSWAConfig.from_hf, bases, graph, prepare=graph.prepare, folder="granitemoeswa")
