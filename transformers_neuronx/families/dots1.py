"""dots.llm1: Qwen3 with a mixture of experts after a few layers without."""

from dataclasses import dataclass
from typing import ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import ACTIVATIONS, LAYER_KINDS
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.routed import RoutedLike
from transformers_neuronx.models.sampling import ForSampling


@dataclass(frozen=True)
class Dots1Config(RoutedLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    tied: bool = hf("tie_word_embeddings")
    attention_bias: bool = hf("attention_bias")
    attention_kinds: list[str] = hf("layer_types", among=LAYER_KINDS)
    window: int | None = hf("sliding_window", None)

    qk_norm = True

    # layer_types follows from the first.
    WITHOUT_EFFECT: ClassVar = frozenset({"max_window_layers"})


class Dots1ForSampling(ForSampling):
    """Transformers' `Dots1ForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(Dots1Config.from_hf, weights, graph, prepare=graph.prepare, folder="dots1")
