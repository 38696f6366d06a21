"""Mellum 2: Qwen3 MoE with windows in most layers, a rotation for each kind of layer, and layers without experts."""

from dataclasses import dataclass
from typing import ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import ACTIVATIONS, LAYER_KINDS, Rotary
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.mixture import DENSE, MixtureLike
from transformers_neuronx.models.sampling import ForSampling


@dataclass(frozen=True)
class MellumConfig(MixtureLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    attention_bias: bool = hf("attention_bias")
    tied: bool = hf("tie_word_embeddings")
    attention_kinds: list[str] = hf("layer_types", among=LAYER_KINDS)
    window: int | None = hf("sliding_window", None)
    n_expert: int = hf("num_local_experts")
    active_experts: int = hf("num_experts_per_tok")
    expert_size: int = hf("moe_intermediate_size")
    normalized: bool = hf("norm_topk_prob")
    blocks: list[str] = hf("mlp_layer_types", among=("dense", "sparse"))

    qk_norm = True

    # The first three are of layers that guess further tokens; the rest is for training.
    WITHOUT_EFFECT: ClassVar = frozenset(
        "num_nextn_predict_layers mtp_layer_types mtp_mlp_layer_types output_router_logits router_aux_loss_coef".split()
    )

    @property
    def unread(self) -> list[str]:
        return [r"mtp\..*"]  # layers that guess further tokens

    @property
    def rotary(self) -> Rotary:
        return self.rotary_of("full_attention")

    def rotary_of(self, kind: str) -> Rotary:
        return self.rotary_with(self.rope[kind.removesuffix(DENSE)])


class MellumForSampling(ForSampling):
    """Transformers' `MellumForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(MellumConfig.from_hf, weights, graph, prepare=graph.prepare, folder="mellum")
