"""Solar Open: GLM-4.5 with experts in every layer, in which all features rotate."""

from dataclasses import dataclass
from typing import ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import ACTIVATIONS
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.mixture import MixtureLike
from transformers_neuronx.models.sampling import ForSampling


@dataclass(frozen=True)
class SolarOpenConfig(MixtureLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    inner_size: int = hf("moe_intermediate_size")
    head_dim: int = hf("head_dim")
    tied: bool = hf("tie_word_embeddings")
    qkv_bias: bool = hf("attention_bias")
    n_expert: int = hf("n_routed_experts")
    active_experts: int = hf("num_experts_per_tok")
    n_shared: int = hf("n_shared_experts")
    normalized: bool = hf("norm_topk_prob")
    routed_scale: float = hf("routed_scaling_factor")
    groups: int = hf("n_group")
    active_groups: int = hf("topk_group")

    sigmoid = True
    correction = "mlp.gate.e_score_correction_bias"

    WITHOUT_EFFECT: ClassVar = frozenset({"intermediate_size", "output_router_logits"})  # every layer has experts

    @property
    def shared_size(self) -> int:  # type: ignore[override]
        return self.n_shared * self.inner_size


class SolarOpenForSampling(ForSampling):
    """Transformers' `SolarOpenForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(SolarOpenConfig.from_hf, weights, graph, prepare=graph.prepare, folder="solaropen")
