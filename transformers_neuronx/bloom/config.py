"""The fields of a BLOOM configuration that its graph and weights need."""

from dataclasses import dataclass
from typing import ClassVar

from transformers_neuronx.config import ModelConfig, hf
from transformers_neuronx.weights import Heads


@dataclass(frozen=True)
class BloomConfig(ModelConfig):
    vocab_size: int = hf("vocab_size")
    hidden_size: int = hf("hidden_size")
    n_layer: int = hf("n_layer")
    n_head: int = hf("n_head")
    eps: float = hf("layer_norm_epsilon")
    residual_after_norm: bool = hf("apply_residual_connection_post_layernorm")
    tied: bool = hf("tie_word_embeddings")

    WITHOUT_EFFECT: ClassVar = frozenset(
        """
        attention_softmax_in_fp32 bias_dropout_fusion masked_softmax_fusion offset_alibi pretraining_tp
        seq_length skip_bias_add skip_bias_add_qkv slow_but_exact unk_token_id
        """.split()
    )
    n_positions: ClassVar = None

    @property
    def attention_heads(self) -> Heads:
        return Heads(self.n_head, self.n_head, self.hidden_size // self.n_head)
