"""Granite MoE SWA (granite-swash): Granite SWA with experts, which are stacked, and maybe a block for all tokens."""

import sys
from dataclasses import dataclass
from typing import ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import ACTIVATIONS, LAYER_KINDS, Rotary
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.mixture import MixtureLike
from transformers_neuronx.models.sampling import ForSampling
from transformers_neuronx.weights import Weight

PREFIX, ignored = weights.PREFIX, weights.ignored


@dataclass(frozen=True)
class GraniteMoeSWAConfig(MixtureLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    tied: bool = hf("tie_word_embeddings")
    attention_bias: bool = hf("attention_bias")
    embedding_scale: float = hf("embedding_multiplier")
    residual_scale: float = hf("residual_multiplier")
    attention_scale: float = hf("attention_multiplier")
    logits_divisor: float = hf("logits_scaling")
    n_expert: int = hf("num_local_experts")
    active_experts: int = hf("num_experts_per_tok")
    shared_size: int = hf("shared_intermediate_size")
    kinds: list[str] = hf("layer_types", among=LAYER_KINDS)
    bases: list[float] = hf("layer_rope_theta")  # 0 for layers that do not rotate
    window: int | None = hf("sliding_window", None)

    router_name = "block_sparse_moe.router"
    of_expert = ()
    of_experts = ("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj")
    shared = ("shared_mlp.input_linear", "shared_mlp.input_linear", "shared_mlp.output_linear")

    WITHOUT_EFFECT: ClassVar = frozenset({"output_router_logits", "router_aux_loss_coef"})  # for training

    @property
    def logit_scale(self) -> float:  # type: ignore[override]
        return 1 / self.logits_divisor

    @property
    def layer_kinds(self) -> list[str]:
        """Whether a layer has a window, and the base of its rotation."""
        return [f"{kind} {float(base)}" for kind, base in zip(self.kinds, self.bases, strict=False)]

    def window_of(self, kind: str) -> int | None:
        return super().window_of(kind.partition(" ")[0])

    def rotary_of(self, kind: str) -> Rotary | None:
        base = float(kind.partition(" ")[2])
        return self.rotary_with({**self.rope, "rope_theta": base}) if base else None


def table(config: GraniteMoeSWAConfig) -> list[Weight]:
    """LLaMA's, with a sink of each head."""
    heads, name = config.attention_heads, f"{weights.BLOCK}self_attn.sinks"
    sinks = Weight("attn.sinks", name, (heads.heads,), split=heads.split(0, unit=1), dtype="f32")
    return [sinks, *weights.table(config)]


class GraniteMoeSWAForSampling(ForSampling):
    """Transformers' `GraniteMoeSWAForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(
        GraniteMoeSWAConfig.from_hf, sys.modules[__name__], graph, prepare=graph.prepare, folder="granitemoeswa"
    )
