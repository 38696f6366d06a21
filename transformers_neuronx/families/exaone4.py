"""EXAONE 4: norms after the blocks, of queries and keys; layers without a window do not rotate if others have one."""

from dataclasses import dataclass
from typing import ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import ACTIVATIONS, LAYER_KINDS, Rotary
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.like import LlamaLike
from transformers_neuronx.models.sampling import ForSampling


@dataclass(frozen=True)
class Exaone4Config(LlamaLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    tied: bool = hf("tie_word_embeddings")
    layer_kinds: list[str] = hf("layer_types", among=LAYER_KINDS)
    window: int | None = hf("sliding_window", None)

    norms: ClassVar = {"attn_out_norm": "post_attention_layernorm", "mlp_out_norm": "post_feedforward_layernorm"}
    qk_norm = True

    WITHOUT_EFFECT: ClassVar = frozenset({"sliding_window_pattern"})  # layer_types follows from it

    def rotary_of(self, kind: str) -> Rotary | None:
        return self.rotary if self.window is None or kind == "sliding_attention" else None


class Exaone4ForSampling(ForSampling):
    """Transformers' `Exaone4ForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(Exaone4Config.from_hf, weights, graph, prepare=graph.prepare, folder="exaone4")
