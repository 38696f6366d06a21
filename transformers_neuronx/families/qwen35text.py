"""Qwen 3.5: three of four layers have a gated delta net in place of attention, and attention is gated."""

from dataclasses import dataclass
from typing import ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import ACTIVATIONS
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.delta import DeltaNetLike
from transformers_neuronx.llama.hybrid import HYBRID_KINDS
from transformers_neuronx.models.sampling import ForSampling


@dataclass(frozen=True)
class Qwen35TextConfig(DeltaNetLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    tied: bool = hf("tie_word_embeddings")
    attention_bias: bool = hf("attention_bias")
    layer_kinds: list[str] = hf("layer_types", among=HYBRID_KINDS)

    WITHOUT_EFFECT: ClassVar = frozenset({"full_attention_interval"})  # layer_types follows from it


class Qwen35TextForSampling(ForSampling):
    """Transformers' `Qwen3_5ForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(Qwen35TextConfig.from_hf, weights, graph, prepare=graph.prepare, folder="qwen35text")
