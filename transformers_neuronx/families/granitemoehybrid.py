"""Granite 4: most layers have Mamba-2 in place of attention, which does not rotate; experts, and a block for all."""

from dataclasses import dataclass
from typing import ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import ACTIVATIONS, Rotary
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.hybrid import HYBRID_KINDS
from transformers_neuronx.llama.mamba import MambaLike
from transformers_neuronx.llama.mixture import MixtureLike
from transformers_neuronx.llama.scaled import ScaledLike
from transformers_neuronx.models.sampling import ForSampling


@dataclass(frozen=True)
class GraniteMoeHybridConfig(ScaledLike, MambaLike, MixtureLike):
    inner_size: int = hf("shared_intermediate_size")
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    tied: bool = hf("tie_word_embeddings")
    attention_bias: bool = hf("attention_bias")
    attention_kinds: list[str] = hf("layer_types", among=HYBRID_KINDS)
    positions: str | None = hf("position_embedding_type", None)
    n_expert: int = hf("num_local_experts")
    active_experts: int = hf("num_experts_per_tok")
    expert_size: int = hf("intermediate_size")

    router_name = "block_sparse_moe.router.layer|block_sparse_moe.router"
    of_expert = ()
    of_experts = (
        "block_sparse_moe.input_linear.weight|block_sparse_moe.experts.gate_up_proj",
        "block_sparse_moe.output_linear.weight|block_sparse_moe.experts.down_proj",
    )
    shared = ("shared_mlp.input_linear", "shared_mlp.input_linear", "shared_mlp.output_linear")
    feed_forward = shared

    WITHOUT_EFFECT: ClassVar = frozenset({"output_router_logits", "router_aux_loss_coef"})  # for training

    @property
    def dense_layers(self) -> range:
        """All layers of a model without experts."""
        return range(0 if self.n_expert else self.n_layer)

    @property
    def shared_size(self) -> int:  # type: ignore[override]
        return self.inner_size

    def rotary_of(self, kind: str) -> Rotary | None:
        return self.rotary if self.positions == "rope" else None


class GraniteMoeHybridForSampling(ForSampling):
    """Transformers' `GraniteMoeHybridForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(GraniteMoeHybridConfig.from_hf, weights, graph, prepare=graph.prepare, folder="granitemoehybrid")
