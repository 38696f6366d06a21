"""ERNIE 4.5 with a mixture of experts in some layers."""

from dataclasses import dataclass
from typing import ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import ACTIVATIONS
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.mixture import MixtureLike
from transformers_neuronx.models.sampling import ForSampling


@dataclass(frozen=True)
class Ernie45MoeConfig(MixtureLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    tied: bool = hf("tie_word_embeddings")
    attention_bias: bool = hf("use_bias", False)
    mlp_bias: bool = hf("use_bias", False)
    head_bias: bool = hf("use_bias", False)
    n_expert: int = hf("moe_num_experts")
    active_experts: int = hf("moe_k")
    expert_size: int = hf("moe_intermediate_size")
    n_shared: int = hf("moe_num_shared_experts", 0)
    first: int = hf("moe_layer_start_index")
    last: int = hf("moe_layer_end_index")
    interval: int = hf("moe_layer_interval")

    in_pairs = True
    correction = "mlp.moe_statics.e_score_correction_bias|mlp.gate.moe_statics.e_score_correction_bias"

    FIXED: ClassVar = {"moe_norm_min": 1e-12}  # smaller than any sum of probabilities of the best experts
    WITHOUT_EFFECT: ClassVar = frozenset({"output_router_logits", "router_aux_loss_coef"})  # for training

    @property
    def dense_layers(self) -> set[int]:
        some = range(self.first, self.last + 1)
        return {n for n in range(self.n_layer) if n not in some or (n + 1) % self.interval}

    @property
    def unread(self) -> list[str]:
        return [r".*\bmtp_.*"]  # layers that guess further tokens


class Ernie45MoeForSampling(ForSampling):
    """Transformers' `Ernie4_5_MoeForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(Ernie45MoeConfig.from_hf, weights, graph, prepare=graph.prepare, folder="ernie45moe")
