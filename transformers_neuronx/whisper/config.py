"""The fields of a Whisper configuration that its graph and weights need. Others are for generate() and training."""

from dataclasses import dataclass

from transformers_neuronx.config import ModelConfig, hf
from transformers_neuronx.layers import ACTIVATIONS
from transformers_neuronx.weights import Heads


@dataclass(frozen=True)
class WhisperConfig(ModelConfig):
    vocab_size: int = hf("vocab_size")
    n_positions: int = hf("max_target_positions")
    hidden_size: int = hf("d_model")
    n_layer: int = hf("decoder_layers")
    encoder_layers: int = hf("encoder_layers")
    n_head: int = hf("decoder_attention_heads")
    encoder_n_head: int = hf("encoder_attention_heads")
    inner_size: int = hf("decoder_ffn_dim")
    encoder_inner_size: int = hf("encoder_ffn_dim")
    activation: str = hf("activation_function", among=ACTIVATIONS)
    mel_bins: int = hf("num_mel_bins")
    source_positions: int = hf("max_source_positions")  # type: ignore[misc]
    tied: bool = hf("tie_word_embeddings")
    decoder_start_token_id: int = hf("decoder_start_token_id")

    WITHOUT_EFFECT = frozenset(
        "activation_dropout apply_spec_augment begin_suppress_tokens classifier_proj_size decoder_layerdrop "
        "dropout encoder_layerdrop forced_decoder_ids init_std mask_feature_length mask_feature_min_masks "
        "mask_feature_prob mask_time_length mask_time_min_masks mask_time_prob median_filter_width scale_embedding "
        "suppress_tokens use_weighted_layer_sum".split()
    )

    @property
    def attention_heads(self) -> Heads:
        return Heads(self.n_head, self.n_head, self.hidden_size // self.n_head)

    @property
    def source_sizes(self) -> tuple[int, int]:
        return self.mel_bins, 2 * self.source_positions  # one convolution has a stride of two
