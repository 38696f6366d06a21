"""SmolLM3: some layers do not rotate."""

from dataclasses import dataclass
from typing import ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import ACTIVATIONS, LAYER_KINDS, Rotary
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.like import LlamaLike
from transformers_neuronx.models.sampling import ForSampling

WITHOUT = " without rotation"


@dataclass(frozen=True)
class SmolLM3Config(LlamaLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    tied: bool = hf("tie_word_embeddings")
    attention_bias: bool = hf("attention_bias")
    mlp_bias: bool = hf("mlp_bias")
    kinds: list[str] = hf("layer_types", among=LAYER_KINDS)
    rotated: list[int] = hf("no_rope_layers")  # 1 for layers that rotate
    window: int | None = hf("sliding_window", None)

    # layer_types and no_rope_layers follow from them.
    WITHOUT_EFFECT: ClassVar = frozenset({"use_sliding_window", "no_rope_layer_interval", "max_window_layers"})

    @property
    def layer_kinds(self) -> list[str]:
        """Whether a layer has a window, and whether it rotates."""
        pairs = zip(self.kinds, self.rotated, strict=False)
        return [kind if rotated else f"{kind}{WITHOUT}" for kind, rotated in pairs]

    def window_of(self, kind: str) -> int | None:
        return super().window_of(kind.removesuffix(WITHOUT))

    def rotary_of(self, kind: str) -> Rotary | None:
        return None if kind.endswith(WITHOUT) else self.rotary


class SmolLM3ForSampling(ForSampling):
    """Transformers' `SmolLM3ForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(SmolLM3Config.from_hf, weights, graph, prepare=graph.prepare, folder="smollm3")
