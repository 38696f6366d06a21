"""Kolibri 1: norms before and after both blocks, rotation in windows only, and experts that are chosen by logits."""

import sys
from dataclasses import dataclass, replace
from typing import ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import ACTIVATIONS, LAYER_KINDS, Rotary, Router
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.mixture import MixtureLike
from transformers_neuronx.models.sampling import ForSampling
from transformers_neuronx.weights import Weight, also_named

PREFIX, ignored = weights.PREFIX, weights.ignored
# Of norms in memory, and in the published checkpoint.
NAMES = {"post_self_attn_layernorm": "post_attn_norm", "post_mlp_layernorm": "post_ffn_norm"}


@dataclass(frozen=True)
class Kolibri1Config(MixtureLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    tied: bool = hf("tie_word_embeddings")
    attention_kinds: list[str] = hf("layer_types", among=LAYER_KINDS)
    window: int = hf("sliding_window")
    n_expert: int = hf("num_local_experts")
    active_experts: int = hf("num_experts_per_tok")
    inner_size: int = hf("moe_intermediate_size")
    shared_size: int = hf("shared_expert_intermediate_size")
    normalized: bool = hf("norm_topk_prob")

    norms: ClassVar = {
        "attn_norm": "input_layernorm",
        "attn_out_norm": "post_self_attn_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "mlp_out_norm": "post_mlp_layernorm",
    }
    qk_norm = True
    sigmoid = True
    correction = "mlp.gate.e_score_correction_bias|moe.router.expert_bias"

    WITHOUT_EFFECT: ClassVar = frozenset({"intermediate_size", "output_router_logits"})  # every layer has experts

    @property
    def router(self) -> Router:
        return replace(super().router, by_logits=True)

    def rotary_of(self, kind: str) -> Rotary | None:
        return self.rotary if kind == "sliding_attention" else None


def table(config: Kolibri1Config) -> list[Weight]:
    return also_named(weights.table(config), NAMES)


class Kolibri1ForSampling(ForSampling):
    """Transformers' `Kolibri1ForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(Kolibri1Config.from_hf, sys.modules[__name__], graph, prepare=graph.prepare, folder="kolibri1")
