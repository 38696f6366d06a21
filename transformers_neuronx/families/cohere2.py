"""Cohere 2 (Command R7B, A): Cohere with windows; layers without a window do not rotate."""

from dataclasses import dataclass
from typing import ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import ACTIVATIONS, LAYER_KINDS, Rotary
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.like import LlamaLike
from transformers_neuronx.models.sampling import ForSampling


@dataclass(frozen=True)
class Cohere2Config(LlamaLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    tied: bool = hf("tie_word_embeddings")
    eps: float = hf("layer_norm_eps")
    attention_bias: bool = hf("attention_bias")
    logit_scale: float = hf("logit_scale")
    layer_kinds: list[str] = hf("layer_types", among=LAYER_KINDS)
    window: int | None = hf("sliding_window", None)

    parallel = True
    in_pairs = True
    norms: ClassVar = {"attn_norm": "input_layernorm"}
    layer_norm = True

    # layer_types follows from them.
    WITHOUT_EFFECT: ClassVar = frozenset({"sliding_window_pattern", "_sliding_window_pattern"})

    def rotary_of(self, kind: str) -> Rotary | None:
        return self.rotary if self.window_of(kind) else None


class Cohere2ForSampling(ForSampling):
    """Transformers' `Cohere2ForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(Cohere2Config.from_hf, weights, graph, prepare=graph.prepare, folder="cohere2")
