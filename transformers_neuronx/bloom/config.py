"""What of a BLOOM configuration its graph and weights need."""

from dataclasses import dataclass
from typing import ClassVar

from transformers_neuronx.config import ModelConfig, hf
from transformers_neuronx.weights import Heads


@dataclass(frozen=True)
class BloomConfig(ModelConfig):
    vocab_size: int = hf("vocab_size")
    # Published checkpoints use these names, of which Transformers writes the second today; the numbers are its own.
    hidden_size: int = hf("n_embed", lambda attributes: attributes.get("hidden_size", 64))
    n_layer: int = hf("num_hidden_layers", lambda attributes: attributes.get("n_layer", 2))
    n_head: int = hf("num_attention_heads", lambda attributes: attributes.get("n_head", 8))
    eps: float = hf("layer_norm_epsilon", 1e-5)
    residual_after_norm: bool = hf("apply_residual_connection_post_layernorm", False)
    tied: bool = hf("tie_word_embeddings", True)

    WITHOUT_EFFECT: ClassVar = frozenset(
        """
        attention_softmax_in_fp32 bias_dropout_fusion hidden_size masked_softmax_fusion n_head n_layer offset_alibi
        pretraining_tp seq_length skip_bias_add skip_bias_add_qkv slow_but_exact unk_token_id
        """.split()
    )
    n_positions: ClassVar = None

    @property
    def attention_heads(self) -> Heads:
        return Heads(self.n_head, self.n_head, self.hidden_size // self.n_head)
