"""Tiny models of many architectures of Transformers, with weights that make errors visible, and their inputs."""

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

IDS = torch.tensor([[5, 17, 2, 31, 8, 44, 3, 9], [7, 21, 33, 4, 50, 1, 0, 0]])
MASK = torch.tensor([[1] * 8, [1] * 6 + [0] * 2])
PIXELS = torch.linspace(-1, 1, 2 * 3 * 32 * 32).reshape(2, 3, 32, 32).sin()
SOUND = torch.linspace(0, 60, 1600).sin()[None]
MEL = torch.linspace(-1, 1, 16 * 64).reshape(1, 16, 64).cos()

SMALL = dict(vocab_size=64, pad_token_id=0, bos_token_id=1, eos_token_id=2)
TEXT = SMALL | dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, max_position_embeddings=64
)
DECODER = TEXT | dict(num_key_value_heads=2, head_dim=8)
TWO = SMALL | dict(
    d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64, decoder_start_token_id=2,
)  # fmt: skip
T5 = SMALL | dict(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_decoder_layers=2, num_heads=4)
VISION = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=32)
PATCHES = VISION | dict(patch_size=8)
STAGES = dict(depths=[1, 1, 1, 1], hidden_sizes=[16, 32, 48, 64])
AUDIO = dict(
    vocab_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
    conv_dim=(16, 16, 16), conv_kernel=(10, 3, 3), conv_stride=(5, 2, 2), num_feat_extract_layers=3,
    num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4,
)  # fmt: skip
CLIP = dict(
    text_config=TEXT | dict(projection_dim=16), vision_config=PATCHES | dict(projection_dim=16), projection_dim=16
)

# By name: the configuration, and the model's other arguments.
TEXT_INPUTS, DECODER_INPUTS = dict(input_ids=IDS, attention_mask=MASK), dict(input_ids=IDS)
TWO_INPUTS = dict(input_ids=IDS, attention_mask=MASK, decoder_input_ids=IDS[:, :4])
IMAGES, SOUNDS = dict(pixel_values=PIXELS), dict(input_values=SOUND)
ZOO = {
    "gpt2": (SMALL | dict(n_embd=32, n_layer=2, n_head=4, n_positions=64), DECODER_INPUTS),
    "gptj": (SMALL | dict(n_embd=32, n_layer=2, n_head=4, n_positions=64, rotary_dim=4), DECODER_INPUTS),
    "gpt_neo": (SMALL | dict(hidden_size=32, num_layers=2, attention_types=[[["global", "local"], 1]], num_heads=4,
                             window_size=4, max_position_embeddings=64), DECODER_INPUTS),
    "gpt_neox": (TEXT, DECODER_INPUTS),
    "opt": (TEXT | dict(ffn_dim=48, word_embed_proj_dim=32), TEXT_INPUTS),
    "bloom": (SMALL | dict(hidden_size=32, n_layer=2, n_head=4), TEXT_INPUTS),
    "falcon": (TEXT | dict(alibi=False, new_decoder_architecture=True, num_kv_heads=2), DECODER_INPUTS),
    "mpt": (SMALL | dict(d_model=32, n_heads=4, n_layers=2, expansion_ratio=2, max_seq_len=64), TEXT_INPUTS),
    "codegen": (SMALL | dict(n_embd=32, n_layer=2, n_head=4, n_positions=64, rotary_dim=4), DECODER_INPUTS),
    "llama": (DECODER, TEXT_INPUTS),
    "mistral": (DECODER | dict(sliding_window=4), DECODER_INPUTS),
    "mixtral": (DECODER | dict(num_local_experts=4), DECODER_INPUTS),
    "qwen2": (DECODER, DECODER_INPUTS),
    "qwen3": (DECODER, DECODER_INPUTS),
    "phi": (TEXT, DECODER_INPUTS),
    "phi3": (DECODER, DECODER_INPUTS),
    "gemma": (DECODER, DECODER_INPUTS),
    "gemma2": (DECODER | dict(sliding_window=4), DECODER_INPUTS),
    "stablelm": (DECODER, DECODER_INPUTS),
    "starcoder2": (DECODER, DECODER_INPUTS),
    "olmo2": (DECODER, DECODER_INPUTS),
    "cohere": (DECODER, DECODER_INPUTS),
    "granite": (DECODER, DECODER_INPUTS),
    "bert": (TEXT, TEXT_INPUTS),
    "roberta": (TEXT | dict(max_position_embeddings=66), TEXT_INPUTS),
    "distilbert": (SMALL | dict(dim=32, n_layers=2, n_heads=4, hidden_dim=48, max_position_embeddings=64), TEXT_INPUTS),
    "albert": (TEXT | dict(embedding_size=16), TEXT_INPUTS),
    "electra": (TEXT | dict(embedding_size=16), TEXT_INPUTS),
    "mpnet": (TEXT | dict(max_position_embeddings=66), TEXT_INPUTS),
    "deberta-v2": (TEXT | dict(relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8), TEXT_INPUTS),
    "modernbert": (TEXT | dict(local_attention=4, cls_token_id=1, sep_token_id=2), TEXT_INPUTS),
    "roformer": (TEXT | dict(embedding_size=32), TEXT_INPUTS),
    "squeezebert": (TEXT | dict(embedding_size=32, q_groups=2, k_groups=2, v_groups=2), TEXT_INPUTS),
    "convbert": (TEXT | dict(embedding_size=32, head_ratio=2, conv_kernel_size=3), TEXT_INPUTS),
    "t5": (T5, TWO_INPUTS),
    "mt5": (T5 | dict(feed_forward_proj="gated-gelu"), TWO_INPUTS),
    "bart": (TWO, TWO_INPUTS),
    "mbart": (TWO, TWO_INPUTS),
    "pegasus": (TWO, TWO_INPUTS),
    "marian": (TWO, TWO_INPUTS),
    "whisper": (TWO | dict(num_mel_bins=16, max_source_positions=32, max_target_positions=32),
                dict(input_features=MEL, decoder_input_ids=IDS[:1, :4])),
    "vit": (PATCHES, IMAGES),
    "deit": (PATCHES, IMAGES),
    "beit": (PATCHES | dict(use_relative_position_bias=True), IMAGES),
    "dinov2": (PATCHES, IMAGES),
    "swin": (dict(image_size=32, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4), IMAGES),
    "convnext": (STAGES | dict(num_stages=4), IMAGES),
    "resnet": (STAGES | dict(embedding_size=16, layer_type="bottleneck"), IMAGES),
    "mobilenet_v2": (dict(depth_multiplier=0.35, min_depth=8, depth_divisible_by=8), IMAGES),
    "segformer": (STAGES | dict(num_attention_heads=[1, 2, 3, 4]), IMAGES),
    "clip": (CLIP, TEXT_INPUTS | IMAGES),
    "siglip": (CLIP, dict(input_ids=IDS) | IMAGES),
    "blip": (CLIP, TEXT_INPUTS | IMAGES),
    "wav2vec2": (AUDIO, SOUNDS),
    "hubert": (AUDIO, SOUNDS),
    "audio-spectrogram-transformer": (VISION | dict(patch_size=8, max_length=32, num_mel_bins=16, frequency_stride=8,
                                                    time_stride=8), dict(input_values=MEL.reshape(1, 64, 16)[:, :32])),
}  # fmt: skip


def randomized(model):
    """Set weights that keep activations near one, and statistics that are not trivial."""
    generator = torch.Generator().manual_seed(0)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if not tensor.is_floating_point():
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        if tensor.ndim > 1:
            tensor.data = noise / max(tensor[0].numel(), 1) ** 0.5
        elif name.endswith(("running_var", "gamma")) or ("norm" in name.lower() and name.endswith("weight")):
            tensor.data = 1 + noise.abs() / 4
        elif name.endswith(("bias", "beta", "running_mean", "weight")):
            tensor.data = noise / 4
    return model.eval()


class Positional(torch.nn.Module):
    """Calls a model with positional inputs."""

    def __init__(self, model, names):
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs):
        options = dict(use_cache=False) if hasattr(self.model.config, "use_cache") else {}
        return self.model(**dict(zip(self.names, inputs, strict=True)), **options, return_dict=True)


def make(name):
    """Return the model and its inputs."""
    options, inputs = ZOO[name]
    config = AutoConfig.for_model(name, **options)
    kind = AutoModelForCausalLM if inputs is DECODER_INPUTS else AutoModel
    return Positional(randomized(kind.from_config(config)), list(inputs)), tuple(inputs.values())
