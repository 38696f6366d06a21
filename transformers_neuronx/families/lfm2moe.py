"""LFM2 with a mixture of experts after a few layers without."""

from dataclasses import dataclass, replace
from typing import ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import Router
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.convolution import CONVOLUTION_KINDS, ConvolutionLike
from transformers_neuronx.llama.mixture import MixtureLike
from transformers_neuronx.models.sampling import ForSampling


@dataclass(frozen=True)
class Lfm2MoeConfig(ConvolutionLike, MixtureLike):
    tied: bool = hf("tie_word_embeddings")
    attention_kinds: list[str] = hf("layer_types", among=CONVOLUTION_KINDS)
    eps: float = hf("norm_eps")
    n_expert: int = hf("num_experts")
    active_experts: int = hf("num_experts_per_tok")
    expert_size: int = hf("moe_intermediate_size")
    normalized: bool = hf("norm_topk_prob")
    routed_scale: float = hf("routed_scaling_factor")
    corrected: bool = hf("use_expert_bias")
    first_dense: int = hf("num_dense_layers")

    sigmoid = True
    router_name = "feed_forward.gate"
    of_expert = tuple(f"feed_forward.experts.#.{part}" for part in ("w1", "w3", "w2"))
    of_experts = ("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj")

    WITHOUT_EFFECT: ClassVar = frozenset({"output_router_logits"})

    @property
    def correction(self) -> str:  # type: ignore[override]
        return "feed_forward.expert_bias" if self.corrected else ""

    @property
    def router(self) -> Router:
        return replace(super().router, eps=1e-6)


class Lfm2MoeForSampling(ForSampling):
    """Transformers' `Lfm2MoeForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(Lfm2MoeConfig.from_hf, weights, graph, prepare=graph.prepare, folder="lfm2moe")
