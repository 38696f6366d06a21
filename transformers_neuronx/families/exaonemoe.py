"""K-EXAONE: norms of queries and keys, rotation in layers with a window only, a mixture of experts."""

from dataclasses import dataclass
from typing import ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import ACTIVATIONS, LAYER_KINDS, Rotary
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.mixture import MixtureLike
from transformers_neuronx.models.sampling import ForSampling


@dataclass(frozen=True)
class ExaoneMoeConfig(MixtureLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    tied: bool = hf("tie_word_embeddings")
    attention_kinds: list[str] = hf("layer_types", among=LAYER_KINDS)
    window: int | None = hf("sliding_window", None)
    n_expert: int = hf("num_experts")
    active_experts: int = hf("num_experts_per_tok")
    expert_size: int = hf("moe_intermediate_size")
    n_shared: int = hf("num_shared_experts")
    normalized: bool = hf("norm_topk_prob")
    routed_scale: float = hf("routed_scaling_factor")
    groups: int = hf("n_group")
    active_groups: int = hf("topk_group")
    blocks: list[str] = hf("mlp_layer_types", among=("dense", "sparse"))

    qk_norm = True
    sigmoid = True
    correction = "mlp.gate.e_score_correction_bias|mlp.e_score_correction_bias"

    # layer_types and mlp_layer_types follow from the first two.
    WITHOUT_EFFECT: ClassVar = frozenset({"sliding_window_pattern", "first_k_dense_replace", "output_router_logits"})

    @property
    def unread(self) -> list[str]:
        return [r"mtp\..*"]  # layers that guess further tokens

    def rotary_of(self, kind: str) -> Rotary | None:
        return self.rotary if self.window is None or kind.startswith("sliding_attention") else None


class ExaoneMoeForSampling(ForSampling):
    """Transformers' `ExaoneMoeForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(ExaoneMoeConfig.from_hf, weights, graph, prepare=graph.prepare, folder="exaonemoe")
