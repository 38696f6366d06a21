"""The fields of a Mistral configuration that its graph and weights need."""

from dataclasses import dataclass

from transformers_neuronx.config import hf
from transformers_neuronx.layers import ACTIVATIONS
from transformers_neuronx.llama.like import LlamaLike


@dataclass(frozen=True)
class MistralConfig(LlamaLike):
    activation: str = hf("hidden_act", among=ACTIVATIONS)
    tied: bool = hf("tie_word_embeddings")
    window: int | None = hf("sliding_window", None)
