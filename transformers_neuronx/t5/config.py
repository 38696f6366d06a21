"""The fields of a T5 configuration that its graph and weights need."""

from dataclasses import dataclass
from typing import ClassVar

from transformers_neuronx.config import ModelConfig, hf
from transformers_neuronx.layers import ACTIVATIONS
from transformers_neuronx.weights import Heads


@dataclass(frozen=True)
class T5Config(ModelConfig):
    vocab_size: int = hf("vocab_size")
    hidden_size: int = hf("d_model")
    n_layer: int = hf("num_decoder_layers", lambda attributes: attributes["num_layers"])
    encoder_layers: int = hf("num_layers")
    n_head: int = hf("num_heads")
    head_dim: int = hf("d_kv")
    inner_size: int = hf("d_ff")
    activation: str = hf("dense_act_fn", among=ACTIVATIONS)
    gated: bool = hf("is_gated_act")
    eps: float = hf("layer_norm_epsilon")
    furthest: int = hf("relative_attention_max_distance")
    scaled_head: bool = hf("scale_decoder_outputs", lambda attributes: attributes["tie_word_embeddings"])
    decoder_start_token_id: int = hf("decoder_start_token_id", lambda attributes: attributes["pad_token_id"])

    # The checkpoint itself shows the number of distance biases and whether the head is tied. The rest is for training,
    # or follows from other attributes.
    WITHOUT_EFFECT: ClassVar = frozenset(
        "relative_attention_num_buckets tie_word_embeddings dropout_rate initializer_factor feed_forward_proj "
        "n_positions output_past".split()
    )

    n_positions: ClassVar = None  # distances do not limit the sequence length

    @property
    def attention_heads(self) -> Heads:
        return Heads(self.n_head, self.n_head, self.head_dim)
