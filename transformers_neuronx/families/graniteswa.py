"""Granite SWA (granite-swash): Granite with windows, attention sinks, and a rotation of each layer's own, or none."""

import sys
from dataclasses import dataclass

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import ACTIVATIONS, LAYER_KINDS, Rotary
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.like import LlamaLike
from transformers_neuronx.models.sampling import ForSampling
from transformers_neuronx.weights import Weight

PREFIX, ignored = weights.PREFIX, weights.ignored


@dataclass(frozen=True)
class GraniteSWAConfig(LlamaLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    tied: bool = hf("tie_word_embeddings")
    attention_bias: bool = hf("attention_bias")
    mlp_bias: bool = hf("mlp_bias")
    embedding_scale: float = hf("embedding_multiplier")
    residual_scale: float = hf("residual_multiplier")
    attention_scale: float = hf("attention_multiplier")
    logits_divisor: float = hf("logits_scaling")
    kinds: list[str] = hf("layer_types", among=LAYER_KINDS)
    bases: list[float] = hf("layer_rope_theta")  # 0 for layers that do not rotate
    window: int | None = hf("sliding_window", None)

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


def table(config: GraniteSWAConfig) -> list[Weight]:
    """LLaMA's, with a sink of each head."""
    heads, name = config.attention_heads, f"{weights.BLOCK}self_attn.sinks"
    sinks = Weight("attn.sinks", name, (heads.heads,), split=heads.split(0, unit=1), dtype="f32")
    return [sinks, *weights.table(config)]


class GraniteSWAForSampling(ForSampling):
    """Transformers' `GraniteSWAForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(GraniteSWAConfig.from_hf, sys.modules[__name__], graph, prepare=graph.prepare, folder="graniteswa")
