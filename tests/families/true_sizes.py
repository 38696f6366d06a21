"""The sizes of published models, from memory, with a layer or two and few experts, by `model_type`.

Of families in one file it is what differs from the defaults of Transformers, which are sizes of a published model, too;
their vocabularies are small.
"""

FOLDERS = {
    "gpt2": dict(n_embd=1600, n_head=25, n_layer=2),  # gpt2-xl
    "opt": dict(hidden_size=2048, ffn_dim=8192, num_attention_heads=32, num_hidden_layers=2),  # opt-1.3b
    "gptj": dict(n_embd=4096, n_head=16, rotary_dim=64, vocab_size=50400, n_layer=1),  # gpt-j-6b
    "gpt_neox": dict(  # pythia-1.4b
        hidden_size=2048, intermediate_size=8192, num_attention_heads=16, vocab_size=50304, num_hidden_layers=2
    ),
    "bloom": dict(hidden_size=1024, n_head=16, n_layer=2),  # bloom-560m
    "llama": dict(  # Llama-3.2-1B
        hidden_size=2048, intermediate_size=8192, num_attention_heads=32, num_key_value_heads=8, vocab_size=128256,
        num_hidden_layers=2, tie_word_embeddings=True, max_position_embeddings=131072, rms_norm_eps=1e-5,
        rope_parameters=dict(
            rope_type="llama3", rope_theta=500000.0, factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        ),
    ),
    "mistral": dict(num_hidden_layers=1),  # Mistral-7B-v0.1, Transformers' default
    "mixtral": dict(num_hidden_layers=1, num_local_experts=3),  # Mixtral-8x7B with fewer experts
    "qwen2": dict(  # Qwen2.5-0.5B
        hidden_size=896, intermediate_size=4864, num_attention_heads=14, num_key_value_heads=2, num_hidden_layers=2,
        tie_word_embeddings=True, rope_parameters=dict(rope_type="default", rope_theta=1e6),
    ),
    "qwen3": dict(  # Qwen3-0.6B
        hidden_size=1024, intermediate_size=3072, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
        num_hidden_layers=2, tie_word_embeddings=True, rope_parameters=dict(rope_type="default", rope_theta=1e6),
    ),
    "phi3": dict(sliding_window=2047, num_hidden_layers=1),  # Phi-3-mini-4k
    "gemma2": dict(num_hidden_layers=2),  # gemma-2-2b, Transformers' default
    "gemma4_text": dict(  # gemma-4-E2B with a smaller vocabulary; the last two layers read keys of the first
        hidden_size=1536, intermediate_size=6144, num_attention_heads=8, num_key_value_heads=1, num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2, num_kv_shared_layers=2, use_double_wide_mlp=True,
        final_logit_softcapping=30.0, vocab_size=8000, vocab_size_per_layer_input=8000,
    ),
    "llama4_text": dict(  # Llama-4-Scout with fewer experts, a smaller vocabulary and smaller chunks
        num_hidden_layers=1, num_local_experts=3, vocab_size=8000, attention_chunk_size=16, rope_parameters=dict(
            rope_type="llama3", rope_theta=500000.0, factor=16.0, low_freq_factor=1.0, high_freq_factor=1.0,
            original_max_position_embeddings=8192,
        ),
    ),
}  # fmt: skip

SMALL = dict(vocab_size=8000, pad_token_id=None, bos_token_id=1, eos_token_id=2)
ONE, TWO = SMALL | dict(num_hidden_layers=1), SMALL | dict(num_hidden_layers=2)
KINDS = TWO | dict(layer_types=["sliding_attention", "full_attention"], sliding_window=16)
SAME_AS_8B = dict(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8)
GRANITE = dict(embedding_multiplier=12.0, residual_multiplier=0.22, logits_scaling=16.0)
LINEAR = TWO | dict(layer_types=["linear_attention", "full_attention"])

ONE_FILE = {
    "gemma": ONE,  # Gemma 7B
    "gemma3_text": KINDS | dict(hidden_size=2560, intermediate_size=10240),  # Gemma 3 4B
    "vaultgemma": KINDS | dict(  # VaultGemma 1B
        hidden_size=1152, intermediate_size=6912, num_attention_heads=4, num_key_value_heads=4
    ),
    "smollm3": TWO | dict(no_rope_layers=[1, 0]),
    "granite": ONE | GRANITE | dict(  # Granite 3.3 8B
        intermediate_size=12800, num_key_value_heads=8, attention_multiplier=0.0078125
    ),
    "granite_swa": KINDS | GRANITE | dict(layer_rope_theta=[1e4, 0], attention_multiplier=0.0078125),  # Swash 2B
    "hyperclovax": ONE,
    "ministral": KINDS | SAME_AS_8B | dict(intermediate_size=12288, head_dim=128),  # Ministral 8B
    "ministral3": ONE,
    "cwm": ONE | dict(layer_types=["full_attention"]),
    "seed_oss": ONE | dict(hidden_size=5120),  # Seed-OSS 36B
    "internlm3": ONE,
    "iquestcoder": ONE,
    "olmo": ONE,
    "olmo2": ONE,
    "olmo3": KINDS,
    "phi": TWO,  # Phi-1.5
    "starcoder2": TWO,  # StarCoder2 3B
    "stablelm": TWO,  # StableLM 3B
    "glm": ONE,
    "glm4": ONE,
    "cohere": ONE | SAME_AS_8B | dict(logit_scale=0.0625),  # Aya 23 8B
    "cohere2": KINDS | SAME_AS_8B | dict(head_dim=128, logit_scale=0.25),  # Command R7B
    "cohere2_moe": KINDS | dict(  # Command A+ with fewer and smaller experts
        hidden_size=4096, intermediate_size=2048, num_attention_heads=64, num_key_value_heads=8, logit_scale=0.25,
        mlp_layer_types=["dense", "sparse"], prefix_dense_intermediate_size=14336, num_experts=8,
        num_experts_per_tok=4, num_shared_experts=1, expert_selection_fn="sigmoid",
    ),
    "exaone4": KINDS | dict(  # EXAONE 4.0 1.2B
        hidden_size=2048, intermediate_size=4096, num_attention_heads=32, num_key_value_heads=8, head_dim=64
    ),
    "ernie4_5": TWO,  # ERNIE 4.5 0.3B
    "hunyuan_v1_dense": ONE | SAME_AS_8B | dict(head_dim=128),  # Hunyuan 7B
    "arcee": ONE | dict(num_attention_heads=20, num_key_value_heads=4, head_dim=128),  # AFM 4.5B
    "apertus": ONE | dict(num_key_value_heads=8, intermediate_size=21504),  # Apertus 8B
    "jais2": ONE,
    "nemotron": ONE | dict(  # Minitron 4B
        hidden_size=3072, intermediate_size=9216, num_attention_heads=24, num_key_value_heads=8, head_dim=128
    ),
    "qwen3_moe": ONE | dict(num_experts=16, head_dim=128),  # Qwen3 30B-A3B
    "mellum": KINDS | dict(num_experts=16),  # Mellum 2 12B-A2.5B
    "olmoe": ONE | dict(num_experts=16),
    "qwen2_moe": ONE | dict(num_experts=8),  # Qwen 1.5 MoE A2.7B
    "glm4_moe": TWO | dict(n_routed_experts=8, head_dim=128),  # GLM-4.5 Air
    "dots1": TWO | dict(n_routed_experts=8, n_shared_experts=2, first_k_dense_replace=1, num_experts_per_tok=6),
    "solar_open": ONE | dict(n_routed_experts=8),
    "exaone_moe": TWO | dict(
        layer_types=["sliding_attention", "full_attention"], sliding_window=16, num_experts=8
    ),
    "afmoe": KINDS | dict(  # Trinity Mini with fewer experts
        moe_intermediate_size=1024, num_attention_heads=32, num_key_value_heads=4, num_experts=16,
        num_experts_per_tok=8, num_shared_experts=1, route_scale=2.826, mup_enabled=True,
    ),
    "kolibri1": KINDS | dict(num_experts=32),
    "minimax_m2": ONE | dict(num_local_experts=16),
    "granitemoe": TWO | GRANITE | dict(  # Granite 3.1 3B-A800M
        hidden_size=1536, intermediate_size=512, num_attention_heads=24, num_key_value_heads=8, num_local_experts=40,
        num_experts_per_tok=8, attention_multiplier=0.015625,
    ),
    "granitemoeshared": TWO | GRANITE | dict(
        hidden_size=1536, intermediate_size=512, num_attention_heads=12, num_key_value_heads=4, num_local_experts=62,
        num_experts_per_tok=6, shared_intermediate_size=1024, attention_multiplier=0.0078125,
    ),
    "granitemoe_swa": KINDS | GRANITE | dict(  # Granite Swash 3B-A600M with fewer experts
        hidden_size=1536, intermediate_size=512, num_attention_heads=12, num_key_value_heads=4, num_local_experts=32,
        num_experts_per_tok=6, shared_intermediate_size=1024, attention_multiplier=0.0078125,
        layer_rope_theta=[1e4, 0],
    ),
    "ernie4_5_moe": TWO | dict(moe_num_experts=8),  # ERNIE 4.5 21B-A3B
    "flex_olmo": ONE | dict(num_experts=3, num_experts_per_tok=2),
    "hunyuan_v1_moe": ONE | dict(  # Hunyuan A13B
        intermediate_size=3072, num_key_value_heads=8, num_experts=8, moe_topk=4, head_dim=128
    ),
    "hy_v3": TWO | dict(num_experts=16),
    "gpt_oss": TWO | dict(
        layer_types=["sliding_attention", "full_attention"], num_local_experts=8, num_experts_per_tok=4
    ),
    "falcon": ONE,  # Falcon 7B
    "gpt_bigcode": SMALL | dict(n_embd=2048, n_inner=8192, n_head=16, n_layer=2, n_positions=2048),  # SantaCoder
    "gpt_neo": SMALL | dict(num_layers=2, attention_types=[[["global", "local"], 1]], window_size=16),  # GPT-Neo 1.3B
    "codegen": SMALL | dict(n_layer=1),  # CodeGen 6B
    "mpt": SMALL | dict(d_model=4096, n_heads=32, n_layers=1),  # MPT 7B
    "qwen3_5_text": LINEAR,
    "qwen3_5_moe_text": LINEAR | dict(num_experts=16),
    "qwen3_next": LINEAR | dict(num_experts=16),
    "lfm2": TWO | dict(layer_types=["conv", "full_attention"]),
    "lfm2_moe": TWO | dict(layer_types=["conv", "full_attention"], num_experts=8, num_dense_layers=1),
    "lfm3": SMALL | dict(num_hidden_layers=3, layer_types=["conv", "sliding_attention", "full_attention"]),  # LFM3 1.7B
    "granitemoehybrid": LINEAR | GRANITE | dict(  # Granite 4.0 H Tiny
        hidden_size=1536, intermediate_size=512, num_attention_heads=12, num_key_value_heads=4, num_local_experts=16,
        num_experts_per_tok=6, shared_intermediate_size=1024, mamba_n_heads=48, mamba_d_head=64, mamba_d_state=128,
        attention_multiplier=0.0078125, position_embedding_type="nope",
    ),
    "bamba": TWO | dict(attn_layer_indices=[1]),  # Bamba 9B
    "nemotron_h": SMALL | dict(  # Nemotron 3 Nano with fewer experts
        layers_block_type=["linear_attention", "moe", "full_attention"], hidden_size=2688, mamba_num_heads=64,
        num_attention_heads=32, num_key_value_heads=2, intermediate_size=1856, moe_intermediate_size=1856,
        moe_shared_expert_intermediate_size=3712, n_routed_experts=16, num_experts_per_tok=6, routed_scaling_factor=2.5,
    ),
    "falcon_h1": ONE | dict(  # Falcon H1 1.5B
        hidden_size=2048, intermediate_size=4096, num_attention_heads=8, num_key_value_heads=2, head_dim=128,
        mamba_d_ssm=3072, mamba_n_heads=48, mamba_d_head=64, mamba_d_state=256,
    ),
    "deepseek_v2": TWO | dict(  # DeepSeek-V2 Lite
        hidden_size=2048, intermediate_size=10944, num_attention_heads=16, num_key_value_heads=16, q_lora_rank=None,
        moe_intermediate_size=1408, n_routed_experts=16, num_experts_per_tok=6, n_shared_experts=2,
        first_k_dense_replace=1,
    ),
    "deepseek_v3": ONE | dict(n_routed_experts=16, first_k_dense_replace=0),
    "mistral4": ONE | dict(n_routed_experts=16),  # Mistral Small 4
    "axk1": ONE | dict(n_routed_experts=16, mlp_layer_types=["sparse"]),
    "glm4_moe_lite": TWO | dict(n_routed_experts=16),  # GLM-4.7 Flash
    "youtu": TWO,
    "minicpm3": TWO,  # MiniCPM3 4B
    "helium": TWO,
    "nanochat": TWO | dict(hidden_size=2048, num_attention_heads=16),  # nanochat-d32
}  # fmt: skip
