"""The fields of a LLaMA configuration that its graph and weights need."""

from dataclasses import dataclass
from typing import ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.layers import ACTIVATIONS
from transformers_neuronx.llama.like import LlamaLike


@dataclass(frozen=True)
class LlamaConfig(LlamaLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    attention_bias: bool = hf("attention_bias")
    mlp_bias: bool = hf("mlp_bias")
    tied: bool = hf("tie_word_embeddings")

    WITHOUT_EFFECT: ClassVar = frozenset({"pretraining_tp"})
