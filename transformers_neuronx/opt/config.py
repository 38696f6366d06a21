"""The fields of an OPT configuration that its graph and weights need."""

from dataclasses import dataclass
from typing import ClassVar

from transformers_neuronx.config import ModelConfig, hf
from transformers_neuronx.layers import ACTIVATIONS
from transformers_neuronx.weights import Heads


@dataclass(frozen=True)
class OPTConfig(ModelConfig):
    vocab_size: int = hf("vocab_size")
    n_positions: int = hf("max_position_embeddings")
    hidden_size: int = hf("hidden_size")
    embed_size: int = hf("word_embed_proj_dim", lambda attributes: attributes["hidden_size"])
    n_layer: int = hf("num_hidden_layers")
    n_head: int = hf("num_attention_heads")
    inner_size: int = hf("ffn_dim")
    activation: str = hf("activation_function", among=ACTIVATIONS)
    bias: bool = hf("enable_bias")
    norm_before: bool = hf("do_layer_norm_before")
    without_final_norm: bool = hf("_remove_final_layer_norm", False)
    tied: bool = hf("tie_word_embeddings")
    norms_learned: bool = hf("layer_norm_elementwise_affine")

    WITHOUT_EFFECT: ClassVar = frozenset({"activation_dropout", "dropout", "init_std", "layerdrop"})
    eps: ClassVar = 1e-5

    @property
    def attention_heads(self) -> Heads:
        return Heads(self.n_head, self.n_head, self.hidden_size // self.n_head)

    @property
    def projected(self) -> bool:
        return self.embed_size != self.hidden_size

    @property
    def final_norm(self) -> bool:
        return self.norm_before and not self.without_final_norm
