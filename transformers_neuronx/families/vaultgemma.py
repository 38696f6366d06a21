"""VaultGemma: Gemma 2 without norms after the blocks."""

import math
from dataclasses import dataclass
from typing import ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.engine.family import Family
from transformers_neuronx.layers import ACTIVATIONS, LAYER_KINDS
from transformers_neuronx.llama import graph, weights
from transformers_neuronx.llama.like import LlamaLike
from transformers_neuronx.models.sampling import ForSampling


@dataclass(frozen=True)
class VaultGemmaConfig(LlamaLike):
    activation: str = hf("hidden_activation", among=ACTIVATIONS)
    tied: bool = hf("tie_word_embeddings")
    attention_bias: bool = hf("attention_bias")
    query_scale: float = hf("query_pre_attn_scalar")
    softcap: float | None = hf("attn_logit_softcapping", None)
    logit_softcap: float | None = hf("final_logit_softcapping", None)
    layer_kinds: list[str] = hf("layer_types", among=LAYER_KINDS)
    window: int | None = hf("sliding_window", None)

    norms: ClassVar = {"attn_norm": "input_layernorm", "mlp_norm": "pre_feedforward_layernorm"}
    norm_plus_one = True

    @property
    def embedding_scale(self) -> float:  # type: ignore[override]
        return math.sqrt(self.hidden_size)

    @property
    def attention_scale(self) -> float:  # type: ignore[override]
        return 1 / math.sqrt(self.query_scale)


class VaultGemmaForSampling(ForSampling):
    """Transformers' `VaultGemmaForCausalLM`, with the options of `Model` and the calls of `ForSampling`."""

    family = Family(VaultGemmaConfig.from_hf, weights, graph, prepare=graph.prepare, folder="vaultgemma")
