"""Granite SWA (granite-swash): Granite with windows, attention sinks, and a rotation of each layer's own, or none."""

from dataclasses import dataclass

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import ACTIVATIONS, LAYER_KINDS
from transformers_neuronx.llama import bases, graph
from transformers_neuronx.llama.bases import BasesLike
from transformers_neuronx.models.sampling import ForSampling


@dataclass(frozen=True)
class GraniteSWAConfig(BasesLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    tied: bool = hf("tie_word_embeddings")
    attention_bias: bool = hf("attention_bias")
    mlp_bias: bool = hf("mlp_bias")
    kinds: list[str] = hf("layer_types", among=LAYER_KINDS)
    bases: list[float] = hf("layer_rope_theta")  # 0 for layers that do not rotate
    window: int | None = hf("sliding_window", None)


class GraniteSWAForSampling(ForSampling):
    """Transformers' `GraniteSWAForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(GraniteSWAConfig.from_hf, bases, graph, prepare=graph.prepare, folder="graniteswa")
