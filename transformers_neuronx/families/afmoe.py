"""Arcee Trinity: four norms, gates of heads, rotation in layers with a window only, a mixture of experts."""

import math
import sys
from dataclasses import dataclass
from typing import ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import ACTIVATIONS, LAYER_KINDS, Rotary
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.mixture import MixtureLike
from transformers_neuronx.models.sampling import ForSampling
from transformers_neuronx.weights import Weight, linear

PREFIX, ignored = weights.PREFIX, weights.ignored


@dataclass(frozen=True)
class AfmoeConfig(MixtureLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    tied: bool = hf("tie_word_embeddings")
    attention_bias: bool = hf("attention_bias")
    attention_kinds: list[str] = hf("layer_types", among=LAYER_KINDS)
    window: int | None = hf("sliding_window", None)
    n_expert: int = hf("num_experts")
    active_experts: int = hf("num_experts_per_tok")
    expert_size: int = hf("moe_intermediate_size")
    n_shared: int = hf("num_shared_experts")
    routed_scale: float = hf("route_scale")
    first_dense: int = hf("num_dense_layers")
    enlarged: bool = hf("mup_enabled", False)

    norms: ClassVar = {
        "attn_norm": "input_layernorm",
        "attn_out_norm": "post_attention_layernorm",
        "mlp_norm": "pre_mlp_layernorm",
        "mlp_out_norm": "post_mlp_layernorm",
    }
    qk_norm = True
    sigmoid = True
    router_name = "mlp.router.gate"
    correction = "mlp.expert_bias"

    # layer_types follows from the first.
    WITHOUT_EFFECT: ClassVar = frozenset({"global_attn_every_n_layers", "output_router_logits"})

    @property
    def embedding_scale(self) -> float:  # type: ignore[override]
        return math.sqrt(self.hidden_size) if self.enlarged else 1.0

    def rotary_of(self, kind: str) -> Rotary | None:
        return self.rotary if kind.startswith("sliding_attention") else None


def table(config: AfmoeConfig) -> list[Weight]:
    """LLaMA's, with a layer of gates of what heads return."""
    heads, name = config.attention_heads, f"{weights.BLOCK}self_attn.gate_proj"
    outputs = heads.heads * heads.head_dim
    return [*weights.table(config), *linear("attn.gate", name, outputs, config.hidden_size, heads.split(0), bias=False)]


class AfmoeForSampling(ForSampling):
    """Transformers' `AfmoeForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(AfmoeConfig.from_hf, sys.modules[__name__], graph, prepare=graph.prepare, folder="afmoe")
