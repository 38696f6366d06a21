"""dots.llm1: Qwen3 with a mixture of experts after a few layers without."""

from dataclasses import dataclass
from typing import ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import ACTIVATIONS, LAYER_KINDS
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.mixture import MixtureLike
from transformers_neuronx.models.sampling import ForSampling


@dataclass(frozen=True)
class Dots1Config(MixtureLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    tied: bool = hf("tie_word_embeddings")
    attention_bias: bool = hf("attention_bias")
    attention_kinds: list[str] = hf("layer_types", among=LAYER_KINDS)
    window: int | None = hf("sliding_window", None)
    n_expert: int = hf("n_routed_experts")
    active_experts: int = hf("num_experts_per_tok")
    expert_size: int = hf("moe_intermediate_size")
    n_shared: int = hf("n_shared_experts")
    normalized: bool = hf("norm_topk_prob", False)
    routed_scale: float = hf("routed_scaling_factor")
    groups: int = hf("n_group", 1)
    active_groups: int = hf("topk_group", 1)
    first_dense: int = hf("first_k_dense_replace", 0)

    qk_norm = True
    sigmoid = True
    correction = "mlp.gate.e_score_correction_bias"

    # layer_types follows from the first.
    WITHOUT_EFFECT: ClassVar = frozenset({"max_window_layers", "output_router_logits"})

    @property
    def dense_layers(self) -> range:
        return range(self.first_dense)

    @property
    def shared_size(self) -> int:  # type: ignore[override]
        return self.n_shared * self.expert_size


class Dots1ForSampling(ForSampling):
    """Transformers' `Dots1ForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(Dots1Config.from_hf, weights, graph, prepare=graph.prepare, folder="dots1")
