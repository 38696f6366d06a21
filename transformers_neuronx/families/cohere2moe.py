"""Cohere 2 with experts (Command A+): an average of chosen and shared ones, after layers with a feed-forward."""

import sys
from dataclasses import dataclass
from typing import Any, ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import ACTIVATIONS, LAYER_KINDS, Cache, Rotary, Router, Step
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.graph import embed as embed, head as head, norm as norm, prepare as prepare
from transformers_neuronx.llama.mixture import DENSE, MixtureLike
from transformers_neuronx.models.sampling import ForSampling
from transformers_neuronx.pyhlo import Tensor


@dataclass(frozen=True)
class Cohere2MoeConfig(MixtureLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    tied: bool = hf("tie_word_embeddings")
    eps: float = hf("rms_norm_eps", lambda given: given["layer_norm_eps"])
    rms_eps: float | None = hf("rms_norm_eps", None)  # without one, norms are layer norms, with layer_norm_eps
    attention_bias: bool = hf("attention_bias")
    logit_scale: float = hf("logit_scale")
    attention_kinds: list[str] = hf("layer_types", among=LAYER_KINDS)
    window: int | None = hf("sliding_window", None)
    n_expert: int = hf("num_experts")
    active_experts: int = hf("num_experts_per_tok")
    expert_size: int = hf("intermediate_size")
    inner_size: int = hf("prefix_dense_intermediate_size", lambda given: given["intermediate_size"])
    chosen_by: str = hf("expert_selection_fn", among=("softmax", "sigmoid"))
    normalized: bool = hf("norm_topk_prob")
    n_shared: int = hf("num_shared_experts", 0)
    combined: str = hf("shared_expert_combination_strategy", among=("average", "sum"))
    blocks: list[str] = hf("mlp_layer_types", among=("dense", "sparse"))
    dense_pattern: int = hf("prefix_dense_sliding_window_pattern")  # at 1, all layers without experts rotate

    parallel, in_pairs = True, True
    norms: ClassVar = {"attn_norm": "input_layernorm"}

    # Transformers does not read rope_scaling. layer_types and rope_parameters follow from the last two.
    FIXED: ClassVar = {"rope_scaling": None}
    WITHOUT_EFFECT: ClassVar = frozenset(
        "layer_norm_eps output_router_logits rope_theta sliding_window_pattern".split()
    )

    @property
    def layer_norm(self) -> bool:  # type: ignore[override]
        return self.rms_eps is None

    @property
    def router(self) -> Router:
        sigmoid = self.chosen_by == "sigmoid"
        return Router(self.active_experts, sigmoid, self.normalized or not sigmoid, by_logits=True)

    def rotary_of(self, kind: str) -> Rotary | None:
        return self.rotary if self.window_of(kind) or (kind.endswith(DENSE) and self.dense_pattern == 1) else None


def layer(
    config: Cohere2MoeConfig, w: Any, x: Tensor, cache: Cache, step: Step, rotate: graph.Rotations, kind: str
) -> tuple[Tensor, Cache]:
    h = graph.normed(config, w, "attn_norm", x)
    attended, cache = graph.mix(config, w, h, cache, step, rotate[kind], config.window_of(kind))
    share = 0.5 if hasattr(w, "moe") and config.n_shared and config.combined == "average" else 1.0
    y = attended + graph.scaled(graph.feed_forward(config, w, step.needed_rows(h)), share)
    return step.needed_rows(x) + y, cache


class Cohere2MoeForSampling(ForSampling):
    """Transformers' `Cohere2MoeForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(Cohere2MoeConfig.from_hf, weights, sys.modules[__name__], prepare=prepare, folder="cohere2moe")
