"""GLM-4.7 Flash: latent attention, and a mixture of experts in most layers."""

from dataclasses import dataclass
from typing import ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import ACTIVATIONS
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.latent import LatentLike
from transformers_neuronx.llama.mixture import MixtureLike
from transformers_neuronx.models.sampling import ForSampling


@dataclass(frozen=True)
class Glm4MoeLiteConfig(LatentLike, MixtureLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    tied: bool = hf("tie_word_embeddings")
    in_pairs: bool = hf("rope_interleave", True)
    n_expert: int = hf("n_routed_experts")
    active_experts: int = hf("num_experts_per_tok")
    expert_size: int = hf("moe_intermediate_size")
    n_shared: int = hf("n_shared_experts")
    normalized: bool = hf("norm_topk_prob")
    routed_scale: float = hf("routed_scaling_factor")
    groups: int = hf("n_group", 1)
    active_groups: int = hf("topk_group", 1)
    blocks: list[str] = hf("mlp_layer_types", among=("dense", "sparse"))
    guesses: int = hf("num_nextn_predict_layers", 0)

    sigmoid = True
    correction = "mlp.gate.e_score_correction_bias"

    FIXED: ClassVar = {"first_k_dense_replace": 1}  # Transformers reads mlp_layer_types alone, by default the same
    WITHOUT_EFFECT: ClassVar = frozenset({"output_router_logits", "pretraining_tp"})

    @property
    def dense_layers(self) -> set[int]:
        return {n for n, block in enumerate(self.blocks) if block == "dense"}

    @property
    def shared_size(self) -> int:  # type: ignore[override]
        return self.n_shared * self.expert_size

    @property
    def unread(self) -> list[str]:
        """Layers after the last one guess further tokens."""
        return [rf"(model\.)?layers\.{self.n_layer + n}\..*" for n in range(self.guesses)]


class Glm4MoeLiteForSampling(ForSampling):
    """Transformers' `Glm4MoeLiteForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(Glm4MoeLiteConfig.from_hf, weights, graph, prepare=graph.prepare, folder="glm4moelite")
