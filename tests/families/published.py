"""Configurations as they are published, with small sizes.

Names, spellings, and missing or additional attributes are those of the published files. Sizes, and the positions that
rotations were stretched from, are small, so that 40 tokens exceed them. Most are written from memory.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Published:
    """`attributes` are those of `config.json`; `mentioned` are those that Transformers does not read.

    `refused` is the reason, as a pattern, if the configuration is refused. `buffers` are additional tensors of the
    checkpoint. A `bare` checkpoint has no head, and no prefix in its names. `stored` is how it has weights in 8 bits,
    `words` how it has them in words, and `coded` in codes of four bits.
    """

    attributes: dict[str, Any]
    mentioned: tuple[str, ...] = ()
    refused: str | None = None
    buffers: tuple[str, ...] = ()
    bare: bool = False
    stored: tuple[Any, ...] = ()
    words: tuple[Any, ...] = ()
    coded: tuple[Any, ...] = ()


def but(base: dict[str, Any], *missing: str, **changes: Any) -> dict[str, Any]:
    """Return a file like another, without some attributes and with others changed."""
    return {name: value for name, value in base.items() if name not in missing} | changes


V4 = "4.33.1"  # the version of Transformers that wrote a file

# GPT-2, OPT, GPT-J.

GPT2 = dict(
    activation_function="gelu_new", architectures=["GPT2LMHeadModel"], attn_pdrop=0.1, bos_token_id=1, embd_pdrop=0.1,
    eos_token_id=1, initializer_range=0.02, layer_norm_epsilon=1e-5, model_type="gpt2", n_ctx=64, n_embd=48, n_head=6,
    n_layer=2, n_positions=64, resid_pdrop=0.1, summary_activation=None, summary_first_dropout=0.1,
    summary_proj_to_labels=True, summary_type="cls_index", summary_use_proj=True,
    task_specific_params={"text-generation": dict(do_sample=True, max_length=50)}, vocab_size=131,
)  # fmt: skip
OPT = dict(
    _name_or_path="opt-125m", _remove_final_layer_norm=False, activation_dropout=0.0, activation_function="relu",
    architectures=["OPTForCausalLM"], attention_dropout=0.0, bos_token_id=2, do_layer_norm_before=True, dropout=0.1,
    eos_token_id=2, ffn_dim=72, hidden_size=48, init_std=0.02, layerdrop=0.0, max_position_embeddings=64,
    model_type="opt", num_attention_heads=6, num_hidden_layers=2, pad_token_id=1, prefix="</s>", torch_dtype="float16",
    transformers_version="4.21.0.dev0", use_cache=True, vocab_size=131, word_embed_proj_dim=48,
)  # fmt: skip
GALACTICA = but(
    OPT, "prefix", activation_function="gelu", enable_bias=False, layer_norm_elementwise_affine=True,
    learned_embeddings=True, scale_embeddings=False,
)  # fmt: skip
KOBOLD = dict(badwordsids=[[7, 9]], welcome="# Welcome!", antemplate="[Genre: <|>]")
GPTJ = dict(
    activation_function="gelu_new", architectures=["GPTJForCausalLM"], attn_pdrop=0.0, bos_token_id=1, embd_pdrop=0.0,
    eos_token_id=1, gradient_checkpointing=False, initializer_range=0.02, layer_norm_epsilon=1e-5, model_type="gptj",
    n_embd=96, n_head=6, n_inner=None, n_layer=2, n_positions=64, resid_pdrop=0.0, rotary=True, rotary_dim=8,
    scale_attn_weights=True, summary_activation=None, summary_first_dropout=0.1, summary_proj_to_labels=True,
    summary_type="cls_index", summary_use_proj=True, task_specific_params={"text-generation": dict(do_sample=True)},
    tie_word_embeddings=False, tokenizer_class="GPT2Tokenizer", transformers_version="4.18.0.dev0", use_cache=True,
    vocab_size=131,
)  # fmt: skip
FIRST = {
    "gpt2": Published(GPT2),
    "gpt2-medium, gpt2-large": Published(but(GPT2, n_special=0, predict_special_tokens=True), ("n_special",)),
    "gpt2-xl": Published(but(GPT2, n_layer=3, n_embd=40, n_head=5, output_past=True), ("output_past",)),
    "distilgpt2": Published(
        but(GPT2, _num_labels=1, id2label={"0": "LABEL_0"}, label2id=dict(LABEL_0=0)), ("_num_labels",)
    ),
    "microsoft/DialoGPT-medium": Published(
        but(GPT2, task_specific_params=dict(conversational=dict(max_length=1000))),
        buffers=("transformer.h.0.attn.bias", "transformer.h.1.attn.masked_bias"),
    ),
    "cerebras/Cerebras-GPT-111M": Published(
        but(GPT2, "n_ctx", activation_function="gelu", n_inner=72, scale_attn_weights=True, torch_dtype="float32")
    ),
    "stanford-crfm/alias-gpt2-small-x21": Published(
        but(GPT2, reorder_and_upcast_attn=True, scale_attn_by_inverse_layer_idx=True, scale_attn_weights=True)
    ),
    "gpt2, saved by Transformers 5": Published(
        but(
            GPT2, "n_ctx", add_cross_attention=False, dtype="float32", n_inner=None, reorder_and_upcast_attn=False,
            scale_attn_by_inverse_layer_idx=False, scale_attn_weights=True, tie_word_embeddings=True,
            transformers_version="5.0.0",
        )
    ),
    "facebook/opt-125m": Published(OPT),
    "facebook/opt-350m": Published(but(OPT, do_layer_norm_before=False, word_embed_proj_dim=20)),
    "facebook/opt-1.3b, of its first days": Published(but(OPT, "_remove_final_layer_norm", "prefix", "torch_dtype")),
    "facebook/opt-iml-1.3b": Published(but(OPT, enable_bias=True, layer_norm_elementwise_affine=True)),
    "facebook/galactica-125m": Published(GALACTICA, ("learned_embeddings", "scale_embeddings")),
    "KoboldAI/OPT-2.7B-Erebus": Published(but(OPT, **KOBOLD), tuple(KOBOLD)),
    "EleutherAI/gpt-j-6b": Published(
        GPTJ, buffers=("transformer.h.0.attn.bias", "transformer.h.1.attn.masked_bias")
    ),
}  # fmt: skip

# GPT-NeoX, BLOOM.

NEOX = dict(
    architectures=["GPTNeoXForCausalLM"], bos_token_id=0, eos_token_id=0, hidden_act="gelu", hidden_size=96,
    initializer_range=0.02, intermediate_size=72, layer_norm_eps=1e-5, max_position_embeddings=64,
    model_type="gpt_neox", num_attention_heads=6, num_hidden_layers=2, rotary_emb_base=10000, rotary_pct=0.25,
    tie_word_embeddings=False, torch_dtype="float16", transformers_version="4.24.0", use_cache=True, vocab_size=131,
)  # fmt: skip
DROPOUTS = ("attention_probs_dropout_prob", "hidden_dropout_prob")
BLOOM = dict(
    apply_residual_connection_post_layernorm=False, architectures=["BloomForCausalLM"], attention_dropout=0.0,
    attention_softmax_in_fp32=True, bias_dropout_fusion=True, bos_token_id=1, eos_token_id=2, hidden_dropout=0.0,
    initializer_range=0.02, layer_norm_epsilon=1e-5, masked_softmax_fusion=True, model_type="bloom", n_embed=48,
    n_inner=None, n_layer=2, num_attention_heads=6, offset_alibi=100, pad_token_id=3, pretraining_tp=1,
    skip_bias_add=True, skip_bias_add_qkv=False, transformers_version="4.20.0", unk_token_id=0, use_cache=True,
    vocab_size=131,
)  # fmt: skip
SECOND = {
    "EleutherAI/gpt-neox-20b": Published(
        but(NEOX, hidden_act="gelu_fast", **dict.fromkeys(DROPOUTS, 0)),
        DROPOUTS,
        buffers=("gpt_neox.layers.0.attention.bias", "gpt_neox.layers.0.attention.rotary_emb.inv_freq"),
    ),
    "EleutherAI/pythia-70m": Published(but(NEOX, use_parallel_residual=True)),
    "EleutherAI/pythia-70m, saved by Transformers 4.48": Published(
        but(
            NEOX, attention_bias=True, attention_dropout=0.0, classifier_dropout=0.1, hidden_dropout=0.0,
            partial_rotary_factor=0.25, rope_scaling=None, rope_theta=10000, use_parallel_residual=True,
        )
    ),
    "databricks/dolly-v2-3b": Published(
        but(NEOX, custom_pipelines={"text-generation": dict(impl="instruct_pipeline.Pipeline", pt="Auto")}),
        ("custom_pipelines",),
    ),
    "togethercomputer/RedPajama-INCITE-7B-Base": Published(but(NEOX, use_parallel_residual=False, rotary_pct=1.0)),
    "EleutherAI/polyglot-ko-1.3b": Published(but(NEOX, rotary_pct=0.5, use_parallel_residual=True)),
    "bigscience/bloom-560m": Published(BLOOM),
    "bigscience/bloom": Published(
        but(
            BLOOM, "n_embed", "num_attention_heads", hidden_size=48, n_head=6, pretraining_tp=4, seq_length=64,
            slow_but_exact=False,
        )
    ),
}  # fmt: skip

# LLaMA.

LLAMA = dict(
    architectures=["LlamaForCausalLM"], bos_token_id=1, eos_token_id=2, hidden_act="silu", hidden_size=48,
    initializer_range=0.02, intermediate_size=72, max_position_embeddings=64, model_type="llama",
    num_attention_heads=6, num_hidden_layers=2, pad_token_id=0, rms_norm_eps=1e-6, tie_word_embeddings=False,
    torch_dtype="float16", transformers_version=V4, use_cache=True, vocab_size=131,
)  # fmt: skip
LLAMA2 = but(LLAMA, "pad_token_id", num_key_value_heads=6, pretraining_tp=1, rms_norm_eps=1e-5, rope_scaling=None)
LLAMA3 = but(
    LLAMA2, attention_bias=False, attention_dropout=0.0, eos_token_id=[2, 3], num_key_value_heads=2,
    rope_theta=500000.0, torch_dtype="bfloat16",
)  # fmt: skip
STRETCH = dict(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16, rope_type="llama3"
)
LLAMA31 = but(LLAMA3, mlp_bias=False, rope_scaling=STRETCH)
LLAMA32 = but(LLAMA31, head_dim=16, rope_scaling=STRETCH | dict(factor=32.0), tie_word_embeddings=True)
SMOLLM2 = but(
    LLAMA3, "pad_token_id", eos_token_id=2, rope_theta=100000, tie_word_embeddings=True, num_attention_heads=3,
    num_key_value_heads=1,
)  # fmt: skip
JS = {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}}
TUNED = dict(
    _flash_attn_2_enabled=True, model_max_length=64, tokenizer_model_max_length=64, tokenizer_padding_side="left"
)
QUANTIZED = dict(
    gptq=dict(bits=4, damp_percent=0.1, desc_act=False, group_size=128, quant_method="gptq", sym=True),
    awq=dict(bits=4, group_size=128, modules_to_not_convert=None, quant_method="awq", version="gemm", zero_point=True),
    nf4=dict(
        _load_in_4bit=True, bnb_4bit_compute_dtype="bfloat16", bnb_4bit_quant_type="nf4", load_in_4bit=True,
        load_in_8bit=False, quant_method="bitsandbytes",
    ),
    compressed=dict(
        config_groups=dict(group_0=dict(targets=["Linear"], weights=dict(num_bits=8, type="float"))),
        format="float-quantized", ignore=["lm_head"], quant_method="compressed-tensors",
    ),
    fp8=dict(activation_scheme="dynamic", fmt="e4m3", quant_method="fp8", weight_block_size=[128, 128]),
    mlx=dict(group_size=64, bits=4),
)  # fmt: skip
THIRD = {
    "huggyllama/llama-7b": Published(but(LLAMA, max_sequence_length=64), ("max_sequence_length",)),
    "meta-llama/Llama-2-7b-hf": Published(
        LLAMA2, buffers=tuple(f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(2))
    ),
    "meta-llama/Meta-Llama-3-8B": Published(LLAMA3),
    "meta-llama/Llama-3.1-8B": Published(LLAMA31),
    "meta-llama/Llama-3.2-1B": Published(LLAMA32),
    "meta-llama/Llama-3.2-1B, saved by Transformers 5": Published(
        but(
            LLAMA32, "rope_scaling", "rope_theta", "torch_dtype", dtype="bfloat16",
            rope_parameters=STRETCH | dict(factor=32.0, rope_theta=500000.0),
        )
    ),
    "unsloth/Llama-3.2-1B-Instruct": Published(
        but(LLAMA32, _name_or_path="meta-llama/Llama-3.2-1B-Instruct", pad_token_id=4, unsloth_fixed=True),
        ("unsloth_fixed",),
    ),
    "HuggingFaceTB/SmolLM2-135M-Instruct": Published(
        but(SMOLLM2, is_llama_config=True, rope_interleaved=False) | {"transformers.js_config": JS},
        ("is_llama_config", "rope_interleaved", "transformers.js_config"),
    ),
    "HuggingFaceTB/SmolLM2-135M-Instruct, of its GGUF": Published(
        but(SMOLLM2, _model_name_or_path="SmolLM2 135M Instruct", unk_token_id=0),
        ("_model_name_or_path", "unk_token_id"),
    ),
    "lmsys/vicuna-7b-v1.5": Published(but(LLAMA2, max_length=64, temperature=0.9, top_p=0.6)),
    "lmsys/vicuna-7b-v1.5-16k": Published(
        but(LLAMA2, max_sequence_length=64, rope_scaling=dict(factor=4.0, type="linear")), ("max_sequence_length",)
    ),
    "codellama/CodeLlama-7b-hf": Published(but(LLAMA2, rope_theta=1000000)),
    "deepseek-ai/deepseek-coder-1.3b-base": Published(
        but(LLAMA2, rope_scaling=dict(factor=4.0, type="linear"), rope_theta=100000)
    ),
    "01-ai/Yi-6B": Published(but(LLAMA, num_key_value_heads=2, rope_theta=5000000.0, torch_dtype="bfloat16")),
    "NousResearch/Yarn-Llama-2-7b-64k": Published(
        but(
            LLAMA2, auto_map={"AutoModelForCausalLM": "modeling_llama_together_yarn.LlamaForCausalLM"},
            rope_scaling=dict(factor=4.0, finetuned=True, original_max_position_embeddings=16, type="yarn"),
        )
    ),
    "upstage/Llama-2-70b-instruct-v2, as its card says": Published(
        but(LLAMA2, max_position_embeddings=16, num_key_value_heads=2, rope_scaling=dict(factor=2.0, type="dynamic"))
    ),
    "a fine-tune": Published(but(LLAMA3, **TUNED), tuple(TUNED)),
    "TheBloke/Llama-2-7B-GPTQ": Published(
        but(LLAMA2, quantization_config=QUANTIZED["gptq"]), words=("gptq", 4, 128, False)
    ),
    "hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4": Published(
        but(LLAMA31, quantization_config=QUANTIZED["awq"]), words=("awq", 4, 128, True)
    ),
    "unsloth/llama-3-8b-bnb-4bit": Published(
        but(
            LLAMA3, hidden_size=64, intermediate_size=128, num_attention_heads=4,
            quantization_config=QUANTIZED["nf4"], unsloth_version="2024.9",
        ),
        ("unsloth_version",), coded=("nf4 nested", 64),
    ),
    "neuralmagic/Meta-Llama-3.1-8B-Instruct-FP8": Published(
        but(LLAMA31, quantization_config=QUANTIZED["compressed"]), stored=("float", (None, None), "_scale")
    ),
    "mlx-community/Llama-3.2-1B-Instruct-4bit": Published(
        but(LLAMA32, quantization=QUANTIZED["mlx"], quantization_config=QUANTIZED["mlx"]),
        refused=r"is quantized \(mlx, 4 bits\)",
    ),
}  # fmt: skip

# Mistral, Mixtral.

MISTRAL = but(
    LLAMA, "pad_token_id", architectures=["MistralForCausalLM"], model_type="mistral", num_key_value_heads=2,
    rms_norm_eps=1e-5, rope_theta=10000.0, sliding_window=8, torch_dtype="bfloat16",
)  # fmt: skip
MISTRAL3 = but(MISTRAL, attention_dropout=0.0, rope_theta=1000000.0, sliding_window=None)
MIXTRAL = but(
    MISTRAL3, architectures=["MixtralForCausalLM"], model_type="mixtral", num_experts_per_tok=2, num_local_experts=4,
    output_router_logits=False, router_aux_loss_coef=0.02,
)  # fmt: skip
FOURTH = {
    "mistralai/Mistral-7B-v0.1": Published(
        MISTRAL, buffers=tuple(f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(2))
    ),
    "mistralai/Mistral-7B-Instruct-v0.3": Published(MISTRAL3),
    "mistralai/Mistral-Nemo-Instruct-2407": Published(but(MISTRAL3, head_dim=16)),
    "NousResearch/Yarn-Mistral-7b-128k": Published(
        but(
            MISTRAL, max_sequence_length=64, sliding_window=64,
            rope_scaling=dict(factor=4.0, finetuned=True, original_max_position_embeddings=16, type="yarn"),
        ),
        ("max_sequence_length",),
    ),
    "mistralai/Ministral-3-3B, its text part renamed": Published(
        but(
            MISTRAL3, "rope_theta", head_dim=16,
            rope_parameters=dict(
                beta_fast=32.0, beta_slow=1.0, factor=4.0, llama_4_scaling_beta=0.1, mscale=1.0, mscale_all_dim=1.0,
                original_max_position_embeddings=16, rope_theta=1000000.0, rope_type="yarn", type="yarn",
            ),
        ),
        refused=r"rope_parameters of type 'yarn' have keys that are not supported: llama_4_scaling_beta=0\.1",
    ),
    "mistralai/Mixtral-8x7B-v0.1": Published(MIXTRAL),
}  # fmt: skip

# Qwen.

QWEN2 = but(
    LLAMA, "pad_token_id", architectures=["Qwen2ForCausalLM"], attention_dropout=0.0, max_window_layers=2,
    model_type="qwen2", num_key_value_heads=2, rope_theta=1000000.0, sliding_window=8, tie_word_embeddings=True,
    torch_dtype="bfloat16", use_sliding_window=False,
)  # fmt: skip
QWEN25 = but(QWEN2, tie_word_embeddings=False)
QWEN3 = but(
    QWEN2, architectures=["Qwen3ForCausalLM"], attention_bias=False, head_dim=16, model_type="qwen3", rope_scaling=None,
    sliding_window=None,
)  # fmt: skip
CHUNKS = dict(chunk_size=32, local_size=8, original_max_position_embeddings=32)
FIFTH = {
    "Qwen/Qwen2-0.5B": Published(QWEN2),
    "Qwen/Qwen2.5-7B-Instruct, stretched as its card says": Published(
        but(QWEN25, rope_scaling=dict(factor=4.0, original_max_position_embeddings=16, type="yarn"))
    ),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": Published(but(QWEN25, use_mrope=False)),
    "unsloth/Qwen2.5-0.5B": Published(
        but(QWEN2, pad_token_id=3, unsloth_fixed=True, unsloth_version="2024.9"), ("unsloth_fixed", "unsloth_version")
    ),
    "Qwen/Qwen2.5-7B-Instruct-1M": Published(
        but(QWEN25, dual_chunk_attention_config=CHUNKS), refused="has dual_chunk_attention_config=.*; supported: None"
    ),
    "Alibaba-NLP/gte-Qwen2-1.5B-instruct": Published(
        but(QWEN2, auto_map=dict(AutoModel="modeling_qwen.Qwen2Model"), is_causal=False),
        refused="has is_causal=False; supported: True",
    ),
    "Qwen/Qwen3-0.6B": Published(QWEN3),
    "Qwen/Qwen3-8B, stretched as its card says": Published(
        but(
            QWEN3, tie_word_embeddings=False,
            rope_scaling=dict(factor=4.0, original_max_position_embeddings=16, rope_type="yarn"),
        )
    ),
    "Qwen/Qwen3-Embedding-0.6B": Published(but(QWEN3, max_window_layers=1), bare=True),
    "Qwen/Qwen3-8B-FP8": Published(
        but(QWEN3, quantization_config=QUANTIZED["fp8"]), stored=("float", (128, 128), "_scale_inv")
    ),
}  # fmt: skip

# Phi-3, Gemma 2.

CODE = dict(AutoConfig="configuration_phi3.Phi3Config", AutoModelForCausalLM="modeling_phi3.Phi3ForCausalLM")
PHI3 = but(
    LLAMA2, "pretraining_tp", architectures=["Phi3ForCausalLM"], attention_bias=False, attention_dropout=0.0,
    auto_map=CODE, embd_pdrop=0.0, model_type="phi3", original_max_position_embeddings=16, pad_token_id=3,
    resid_pdrop=0.0, rope_theta=10000.0, sliding_window=8, torch_dtype="bfloat16",
)  # fmt: skip


def longrope(count: int, name: str) -> dict[str, Any]:
    factors = [1.0 + 0.5 * i for i in range(count)]
    return dict(long_factor=factors, short_factor=factors[::-1], type=name)


GEMMA2 = but(
    LLAMA, architectures=["Gemma2ForCausalLM"], attention_bias=False, attention_dropout=0.0,
    attn_logit_softcapping=50.0, cache_implementation="hybrid", final_logit_softcapping=30.0, head_dim=16,
    hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh", model_type="gemma2", num_key_value_heads=2,
    query_pre_attn_scalar=16, rope_theta=10000.0, sliding_window=8, torch_dtype="float32",
)  # fmt: skip
del GEMMA2["tie_word_embeddings"]
SIXTH = {
    "microsoft/Phi-3-mini-4k-instruct": Published(PHI3),
    "microsoft/Phi-3-mini-128k-instruct": Published(
        but(PHI3, rope_scaling=longrope(4, "longrope"), sliding_window=262144)
    ),
    "microsoft/Phi-3-mini-128k-instruct, of its first days": Published(
        but(PHI3, rope_scaling=longrope(4, "su"), sliding_window=262144),
        refused="(?s)Transformers rejects the phi3 configuration.*original_max_position_embeddings",
    ),
    "microsoft/Phi-4-mini-instruct": Published(
        but(
            PHI3, full_attn_mod=1, head_dim=16, hidden_size=96, interpolate_factor=1, lm_head_bias=False,
            mlp_bias=False, num_key_value_heads=2, partial_rotary_factor=0.75, rope_scaling=longrope(6, "longrope"),
            sliding_window=262144, tie_word_embeddings=True,
        )
    ),
    "microsoft/phi-4": Published(
        but(PHI3, "auto_map", num_key_value_heads=2, rope_theta=250000, sliding_window=None)
    ),
    "google/gemma-2-2b": Published(GEMMA2),
    "google/gemma-2-9b": Published(but(GEMMA2, sliding_window_size=8), ("sliding_window_size",)),
    "google/gemma-2-27b": Published(
        but(GEMMA2, num_hidden_layers=3, query_pre_attn_scalar=9, sliding_window_size=8), ("sliding_window_size",)
    ),
}  # fmt: skip

# Whisper. These are not decoders alone: they are in a list of their own.

WHISPER = dict(
    activation_dropout=0.0, activation_function="gelu", architectures=["WhisperForConditionalGeneration"],
    attention_dropout=0.0, begin_suppress_tokens=[20, 1], bos_token_id=1, d_model=48, decoder_attention_heads=6,
    decoder_ffn_dim=72, decoder_layerdrop=0.0, decoder_layers=2, decoder_start_token_id=92, dropout=0.0,
    encoder_attention_heads=6, encoder_ffn_dim=72, encoder_layerdrop=0.0, encoder_layers=2, eos_token_id=1,
    forced_decoder_ids=[[1, 93], [2, 96], [3, 99]], init_std=0.02, is_encoder_decoder=True, max_length=64,
    max_source_positions=50, max_target_positions=64, model_type="whisper", num_hidden_layers=2, num_mel_bins=8,
    pad_token_id=1, scale_embedding=False, suppress_tokens=[5, 11], torch_dtype="float32",
    transformers_version="4.27.0.dev0", use_cache=True, vocab_size=131, _name_or_path="openai/whisper-tiny",
)  # fmt: skip
LARGE = but(
    WHISPER, "forced_decoder_ids", "max_length", "suppress_tokens", apply_spec_augment=False, classifier_proj_size=256,
    mask_feature_length=10, mask_feature_min_masks=0, mask_feature_prob=0.0, mask_time_length=10,
    mask_time_min_masks=2, mask_time_prob=0.05, median_filter_width=7, num_mel_bins=12, torch_dtype="float16",
    use_weighted_layer_sum=False, _name_or_path="openai/whisper-large-v3", transformers_version="4.36.0.dev0",
)  # fmt: skip
SPEECH = {
    "openai/whisper-tiny": Published(WHISPER),
    "openai/whisper-large-v3": Published(LARGE),
    "openai/whisper-large-v3-turbo": Published(but(LARGE, decoder_layers=1, encoder_layers=3, num_hidden_layers=3)),
    "distil-whisper/distil-large-v3": Published(
        but(LARGE, decoder_layers=2, encoder_layers=3, num_hidden_layers=3, max_length=64)
    ),
}

# Mixtures of experts.

QWEN2_MOE = but(
    QWEN2, architectures=["Qwen2MoeForCausalLM"], decoder_sparse_step=1, model_type="qwen2_moe",
    moe_intermediate_size=40, norm_topk_prob=False, num_experts=6, num_experts_per_tok=2, num_key_value_heads=6,
    output_router_logits=False, router_aux_loss_coef=0.001, shared_expert_intermediate_size=72,
    tie_word_embeddings=False,
)  # fmt: skip
QWEN3_MOE = but(
    QWEN3, architectures=["Qwen3MoeForCausalLM"], decoder_sparse_step=1, mlp_only_layers=[], model_type="qwen3_moe",
    moe_intermediate_size=40, norm_topk_prob=True, num_experts=6, num_experts_per_tok=2, output_router_logits=False,
    router_aux_loss_coef=0.001, tie_word_embeddings=False,
)  # fmt: skip
GLM45 = but(
    LLAMA, "pad_token_id", architectures=["Glm4MoeForCausalLM"], attention_bias=True, attention_dropout=0.0,
    eos_token_id=[2, 3], first_k_dense_replace=1, head_dim=16, model_type="glm4_moe", moe_intermediate_size=40,
    n_group=1, n_routed_experts=6, n_shared_experts=1, norm_topk_prob=True, num_experts_per_tok=2,
    num_key_value_heads=2, num_nextn_predict_layers=1, partial_rotary_factor=0.5, rms_norm_eps=1e-5, rope_scaling=None,
    rope_theta=1000000, routed_scaling_factor=1.0, topk_group=1, torch_dtype="bfloat16", use_qk_norm=False,
)  # fmt: skip
GUESSES = ("embed_tokens.weight", "enorm.weight", "eh_proj.weight", "mlp.experts.0.up_proj.weight")
DOTS = but(
    LLAMA, "pad_token_id", architectures=["Dots1ForCausalLM"], attention_bias=False, attention_dropout=0.0,
    first_k_dense_replace=1, max_window_layers=2, model_type="dots1", moe_intermediate_size=40, moe_layer_freq=1,
    n_group=1, n_routed_experts=6, n_shared_experts=2, norm_topk_prob=True, num_experts_per_tok=2,
    num_key_value_heads=6, pretraining_tp=1, rms_norm_eps=1e-5, rope_scaling=None, rope_theta=10000000,
    routed_scaling_factor=2.5, scoring_func="noaux_tc", sliding_window=None, topk_group=1, use_sliding_window=False,
)  # fmt: skip
MINIMAX = but(
    LLAMA, "pad_token_id", architectures=["MiniMaxM2ForCausalLM"], attn_type_list=[1, 1],
    auto_map=dict(AutoModelForCausalLM="modeling_minimax_m2.MiniMaxM2ForCausalLM"), bos_token_id=None,
    eos_token_id=None, head_dim=16, layernorm_full_attention_beta=1.0, mlp_intermediate_size=72,
    model_type="minimax_m2", mtp_transformer_layers=1, num_experts_per_tok=2, num_key_value_heads=2,
    num_local_experts=6, num_mtp_modules=3, output_router_logits=False, qk_norm_type="per_layer", rope_theta=5000000,
    rotary_dim=8, router_aux_loss_coef=0.001, router_jitter_noise=0.0, scoring_func="sigmoid",
    shared_intermediate_size=0, shared_moe_mode="sigmoid", sliding_window=None, use_mtp=True, use_qk_norm=True,
    use_routing_bias=True,
)  # fmt: skip
GRANITE_MOE = but(
    LLAMA, architectures=["GraniteMoeForCausalLM"], attention_bias=False, attention_dropout=0.1,
    attention_multiplier=0.015625, bos_token_id=0, embedding_multiplier=12.0, eos_token_id=0, logits_scaling=6.0,
    model_type="granitemoe", num_experts_per_tok=2, num_key_value_heads=2, num_local_experts=6,
    output_router_logits=False, residual_multiplier=0.22, rope_scaling=None, rope_theta=10000,
    router_aux_loss_coef=0.0, tie_word_embeddings=True, torch_dtype="bfloat16",
)  # fmt: skip
ERNIE_MOE = but(
    LLAMA, architectures=["Ernie4_5_MoeForCausalLM"], model_type="ernie4_5_moe", moe_capacity=[64, 64, 64],
    moe_gate="topk", moe_intermediate_size=40, moe_k=2, moe_layer_end_index=1, moe_layer_interval=1,
    moe_layer_start_index=1, moe_num_experts=6, moe_num_shared_experts=2, moe_use_aux_free=True,
    num_key_value_heads=2, num_nextn_predict_layers=1, rms_norm_eps=1e-5, rope_scaling=None, rope_theta=500000.0,
    tie_word_embeddings=True, torch_dtype="bfloat16", use_bias=False,
)  # fmt: skip
HUNYUAN = but(
    LLAMA, add_classification_head=False, architectures=["HunYuanMoEV1ForCausalLM"], attention_bias=False,
    attention_dropout=0.1, attention_head_dim=16, cla_share_factor=2, eod_token_id=3, head_dim=16, mlp_bias=False,
    model_type="hunyuan_v1_moe", moe_intermediate_size=[72, 72], moe_layer_num_skipped=0, moe_topk=[2, 2],
    norm_topk_prob=True, norm_type="rms", num_experts=6, num_key_value_heads=2, num_shared_expert=[1, 1],
    pretraining_tp=1, rms_norm_eps=1e-5,
    rope_scaling=dict(
        alpha=1000.0, beta_fast=32, beta_slow=1, factor=1.0, mscale=1.0, mscale_all_dim=1.0, type="dynamic"
    ),
    rope_theta=10000.0, tie_word_embeddings=True, torch_dtype="bfloat16", use_cla=False, use_mixed_mlp_moe=True,
    use_qk_norm=True, use_rotary_pos_emb=True,
)  # fmt: skip
UNREAD = dict(
    minimax=(
        "attn_type_list layernorm_full_attention_beta mlp_intermediate_size mtp_transformer_layers num_mtp_modules "
        "qk_norm_type scoring_func shared_intermediate_size shared_moe_mode use_mtp use_qk_norm use_routing_bias"
    ),
    ernie="moe_capacity moe_gate moe_use_aux_free num_nextn_predict_layers",
    hunyuan=(
        "add_classification_head attention_head_dim cla_share_factor mlp_bias moe_intermediate_size "
        "moe_layer_num_skipped norm_topk_prob norm_type num_shared_expert use_cla use_mixed_mlp_moe use_qk_norm "
        "use_rotary_pos_emb"
    ),
)
SEVENTH = {
    "Qwen/Qwen1.5-MoE-A2.7B": Published(QWEN2_MOE),
    "Qwen/Qwen3-30B-A3B": Published(QWEN3_MOE),
    "Qwen/Qwen3-30B-A3B-FP8": Published(
        but(QWEN3_MOE, quantization_config=QUANTIZED["fp8"]), stored=("float", (128, 128), "_scale_inv")
    ),
    "zai-org/GLM-4.5-Air": Published(GLM45, buffers=tuple(f"model.layers.2.{name}" for name in GUESSES)),
    "rednote-hilab/dots.llm1.inst": Published(
        DOTS, ("moe_layer_freq", "pretraining_tp", "scoring_func", "use_sliding_window")
    ),
    "MiniMaxAI/MiniMax-M2, without FP8": Published(MINIMAX, tuple(UNREAD["minimax"].split())),
    "ibm-granite/granite-3.1-1b-a400m-base": Published(GRANITE_MOE),
    "baidu/ERNIE-4.5-21B-A3B-PT": Published(
        ERNIE_MOE, tuple(UNREAD["ernie"].split()),
        buffers=("model.mtp_block.0.mlp.up_proj.weight", "model.mtp_emb_norm.0.weight"),
    ),
    "tencent/Hunyuan-A13B-Instruct": Published(HUNYUAN, tuple(UNREAD["hunyuan"].split())),
}  # fmt: skip

# gpt-oss.

GPT_OSS = dict(
    architectures=["GptOssForCausalLM"], attention_bias=True, attention_dropout=0.0, eos_token_id=2,
    experts_per_token=2, head_dim=16, hidden_act="silu", hidden_size=64, initial_context_length=16,
    initializer_range=0.02, intermediate_size=96, layer_types=["sliding_attention", "full_attention"],
    max_position_embeddings=64, model_type="gpt_oss", num_attention_heads=6, num_experts_per_tok=2,
    num_hidden_layers=2, num_key_value_heads=2, num_local_experts=5, output_router_logits=False, pad_token_id=1,
    quantization_config=dict(
        modules_to_not_convert=[
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
        ],
        quant_method="mxfp4",
    ),
    rms_norm_eps=1e-05,
    rope_scaling=dict(
        beta_fast=32.0, beta_slow=1.0, factor=4.0, original_max_position_embeddings=16, rope_type="yarn",
        truncate=False,
    ),
    rope_theta=150000, router_aux_loss_coef=0.9, sliding_window=8, swiglu_limit=7.0, tie_word_embeddings=False,
    transformers_version="4.55.0.dev0", use_cache=True, vocab_size=131,
)  # fmt: skip
EIGHTH = {
    "openai/gpt-oss-20b": Published(
        GPT_OSS, ("experts_per_token", "initial_context_length"), coded=("experts", 32)
    ),
}  # fmt: skip

# Gemma 4. All are halves of multimodal models.

GEMMA4 = dict(
    architectures=["Gemma4ForCausalLM"], attention_bias=False, attention_dropout=0.0, attention_k_eq_v=False,
    bos_token_id=2, dtype="bfloat16", enable_moe_block=False, eos_token_id=1, final_logit_softcapping=30.0,
    global_head_dim=32, head_dim=16, hidden_activation="gelu_pytorch_tanh", hidden_size=48,
    hidden_size_per_layer_input=8, initializer_range=0.02, intermediate_size=72,
    layer_types=["sliding_attention", "full_attention"] * 2, max_position_embeddings=64, model_type="gemma4_text",
    moe_intermediate_size=None, num_attention_heads=6, num_experts=None, num_global_key_value_heads=None,
    num_hidden_layers=4, num_key_value_heads=1, num_kv_shared_layers=2, pad_token_id=0, rms_norm_eps=1e-6,
    rope_parameters=dict(
        full_attention=dict(partial_rotary_factor=0.25, rope_theta=1000000.0, rope_type="proportional"),
        sliding_attention=dict(rope_theta=10000.0, rope_type="default"),
    ),
    sliding_window=8, tie_word_embeddings=True, top_k_experts=None, transformers_version="5.5.0.dev0",
    use_bidirectional_attention=None, use_cache=True, use_double_wide_mlp=True, vocab_size=131,
    vocab_size_per_layer_input=131,
)  # fmt: skip
LARGE = dict(
    attention_k_eq_v=True, hidden_size_per_layer_input=0, num_global_key_value_heads=1, num_key_value_heads=3,
    num_kv_shared_layers=0, use_bidirectional_attention="vision", use_double_wide_mlp=False,
)  # fmt: skip
OF_READER = tuple(f"model.layers.3.self_attn.{name}.weight" for name in ("k_norm", "k_proj", "v_proj"))
NINTH = {
    "google/gemma-4-E2B-it, its text part": Published(GEMMA4, buffers=OF_READER),
    "google/gemma-4-E4B-it, its text part": Published(
        but(GEMMA4, num_key_value_heads=2, use_double_wide_mlp=False), buffers=OF_READER
    ),
    "google/gemma-4-31B-it, its text part": Published(GEMMA4 | LARGE),
    "google/gemma-4-26B-A4B-it, its text part": Published(
        GEMMA4 | LARGE | dict(enable_moe_block=True, moe_intermediate_size=40, num_experts=6, top_k_experts=2)
    ),
}  # fmt: skip

# Llama 4. All are halves of multimodal models.

LLAMA4 = dict(
    _attn_implementation_autoset=True, architectures=["Llama4ForCausalLM"], attention_bias=False,
    attention_chunk_size=8, attention_dropout=0.0, attn_scale=0.1, attn_temperature_tuning=True, bos_token_id=1,
    eos_token_id=[2, 3], floor_scale=8, for_llm_compressor=False, head_dim=16, hidden_act="silu", hidden_size=48,
    initializer_range=0.02, interleave_moe_layer_step=1, intermediate_size=40, intermediate_size_mlp=72,
    max_position_embeddings=64, model_type="llama4_text", no_rope_layers=[1, 1, 1, 0], num_attention_heads=6,
    num_experts_per_tok=1, num_hidden_layers=4, num_key_value_heads=2, num_local_experts=5, output_router_logits=False,
    pad_token_id=4, rms_norm_eps=1e-5,
    rope_scaling=dict(
        factor=16.0, high_freq_factor=1.0, low_freq_factor=1.0, original_max_position_embeddings=16, rope_type="llama3"
    ),
    rope_theta=500000.0, router_aux_loss_coef=0.001, router_jitter_noise=0.0, torch_dtype="bfloat16",
    transformers_version="4.51.0.dev0", use_cache=True, use_qk_norm=True, vocab_size=131,
)  # fmt: skip
TENTH = {
    "meta-llama/Llama-4-Scout-17B-16E-Instruct, its text part": Published(LLAMA4, ("for_llm_compressor",)),
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct, its text part": Published(
        but(LLAMA4, "rope_scaling", interleave_moe_layer_step=2, num_local_experts=8, use_qk_norm=False),
        ("for_llm_compressor",),
    ),
}  # fmt: skip

PUBLISHED = FIRST | SECOND | THIRD | FOURTH | FIFTH | SIXTH | SEVENTH | EIGHTH | NINTH | TENTH
