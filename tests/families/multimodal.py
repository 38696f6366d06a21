"""Configurations of multimodal models as they are published, with small sizes. Most are written from memory.

`ATTRIBUTES` has those of `config.json` by model type. Rotations are stretched from few positions, where any are.
"""

TEXT = dict(
    hidden_size=48, intermediate_size=72, max_position_embeddings=64, num_attention_heads=6, num_hidden_layers=2,
    num_key_value_heads=2, vocab_size=131,
)  # fmt: skip
TOWER = dict(
    hidden_size=32, image_size=28, intermediate_size=32, num_attention_heads=2, num_hidden_layers=2, patch_size=14,
)  # fmt: skip
TOKENS = dict(image_token_id=125, video_token_id=126, vision_start_token_id=127, vision_end_token_id=128)
QWEN = TEXT | dict(attention_dropout=0.0, hidden_act="silu", initializer_range=0.02, rms_norm_eps=1e-6, use_cache=True)
QWEN2_VL = TOKENS | QWEN | dict(
    architectures=["Qwen2VLForConditionalGeneration"], bos_token_id=1, eos_token_id=2, max_window_layers=2,
    model_type="qwen2_vl", rope_scaling=dict(mrope_section=[1, 1, 2], type="mrope"), rope_theta=1000000.0,
    sliding_window=8, tie_word_embeddings=True, torch_dtype="float32", transformers_version="4.41.2",
    use_sliding_window=False, vision_token_id=129,
    vision_config=dict(depth=2, embed_dim=32, hidden_size=48, in_chans=3, num_heads=2, spatial_patch_size=14),
)  # fmt: skip
CLIP = TOWER | dict(model_type="clip_vision_model", projection_dim=16, vocab_size=32000)
LLAVA = dict(
    architectures=["LlavaForConditionalGeneration"], ignore_index=-100, image_token_index=125, model_type="llava",
    pad_token_id=126, projector_hidden_act="gelu", text_config=TEXT | dict(
        _name_or_path="lmsys/vicuna-7b-v1.5", architectures=["LlamaForCausalLM"], model_type="llama",
        rms_norm_eps=1e-05, torch_dtype="float16",
    ),
    tie_word_embeddings=False, torch_dtype="float32", transformers_version="4.36.0.dev0", vision_config=CLIP,
    vision_feature_layer=-2, vision_feature_select_strategy="default", vocab_size=131,
)  # fmt: skip
IDEFICS3 = dict(
    architectures=["Idefics3ForConditionalGeneration"], image_token_id=125, model_type="idefics3", scale_factor=2,
    text_config=TEXT | dict(model_type="llama", rms_norm_eps=1e-5, rope_theta=500000.0), torch_dtype="float32",
    vision_config=TOWER,
)  # fmt: skip
QWEN3_5 = TOKENS | dict(
    architectures=["Qwen3_5ForConditionalGeneration"], model_type="qwen3_5", tie_word_embeddings=True,
    text_config=QWEN | dict(
        attention_bias=False, attn_output_gate=True, dtype="float32", eos_token_id=2, full_attention_interval=2,
        head_dim=32, layer_types=["linear_attention", "full_attention"], linear_conv_kernel_dim=4,
        linear_key_head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_value_head_dim=16,
        mamba_ssm_dtype="float32", mlp_only_layers=[], model_type="qwen3_5_text", mtp_num_hidden_layers=1,
        mtp_use_dedicated_embeddings=False, partial_rotary_factor=0.25, tie_word_embeddings=True,
        rope_parameters=dict(
            mrope_interleaved=True, mrope_section=[2, 1, 1], partial_rotary_factor=0.25, rope_theta=10000000,
            rope_type="default",
        ),
    ),
    transformers_version="4.57.0.dev0",
    vision_config=dict(deepstack_visual_indexes=[], depth=2, hidden_size=32, intermediate_size=32, num_heads=2,
                       model_type="qwen3_5", num_position_embeddings=16, out_hidden_size=48),
)  # fmt: skip
ATTRIBUTES = {
    "qwen2_vl": QWEN2_VL,
    "qwen2_5_vl": QWEN2_VL | dict(
        architectures=["Qwen2_5_VLForConditionalGeneration"], model_type="qwen2_5_vl", tie_word_embeddings=False,
        rope_scaling=dict(  # as its card says, for long texts
            factor=4, mrope_section=[1, 1, 2], original_max_position_embeddings=16, type="yarn"
        ),
        vision_config=dict(depth=2, fullatt_block_indexes=[1], hidden_size=32, intermediate_size=32, num_heads=2,
                           out_hidden_size=48),
    ),
    "qwen3_vl": TOKENS | dict(
        architectures=["Qwen3VLForConditionalGeneration"], model_type="qwen3_vl", tie_word_embeddings=True,
        text_config=QWEN | dict(
            attention_bias=False, bos_token_id=1, dtype="float32", eos_token_id=2, head_dim=16,
            model_type="qwen3_vl_text", rope_theta=5000000, tie_word_embeddings=True,
            rope_scaling=dict(mrope_interleaved=True, mrope_section=[4, 2, 2], rope_type="default"),
        ),
        transformers_version="4.57.0.dev0",
        vision_config=dict(deepstack_visual_indexes=[0], depth=2, hidden_size=32, intermediate_size=32, num_heads=2,
                           model_type="qwen3_vl", num_position_embeddings=16, out_hidden_size=48),
    ),
    "qwen3_5": QWEN3_5,
    "qwen3_5_moe": QWEN3_5 | dict(
        architectures=["Qwen3_5MoeForConditionalGeneration"], model_type="qwen3_5_moe", tie_word_embeddings=False,
        text_config=QWEN3_5["text_config"] | dict(
            model_type="qwen3_5_moe_text", moe_intermediate_size=40, num_experts=5, num_experts_per_tok=2,
            router_aux_loss_coef=0.001, shared_expert_intermediate_size=56, tie_word_embeddings=False,
        ),
        vision_config=QWEN3_5["vision_config"] | dict(model_type="qwen3_5_moe"),
    ),
    "gemma3": dict(
        architectures=["Gemma3ForConditionalGeneration"], boi_token_index=127, eoi_token_index=128,
        eos_token_id=[1, 106], image_token_index=125, initializer_range=0.02, mm_tokens_per_image=4,
        model_type="gemma3",
        text_config=TEXT | dict(
            head_dim=16, model_type="gemma3_text", query_pre_attn_scalar=128, sliding_window=5,
            sliding_window_pattern=2, rope_scaling=dict(factor=8.0, rope_type="linear"),
        ),
        torch_dtype="float32", transformers_version="4.50.0.dev0",
        vision_config=TOWER | dict(model_type="siglip_vision_model", vision_use_head=False),
    ),
    "gemma4": dict(
        architectures=["Gemma4ForConditionalGeneration"], audio_token_id=125, boa_token_id=126, boi_token_id=127,
        dtype="float32", eos_token_id=[1, 106], image_token_id=128, model_type="gemma4", tie_word_embeddings=True,
        audio_config=dict(hidden_size=32, model_type="gemma4_audio", num_attention_heads=2, num_hidden_layers=1,
                          output_proj_dims=32, subsampling_conv_channels=[8, 4]),
        text_config=TEXT | dict(
            attention_k_eq_v=False, enable_moe_block=False, final_logit_softcapping=30.0, global_head_dim=32,
            head_dim=16, hidden_size_per_layer_input=8, layer_types=["sliding_attention", "full_attention"] * 2,
            model_type="gemma4_text", num_hidden_layers=4, num_kv_shared_layers=2, sliding_window=5,
            use_double_wide_mlp=True, vocab_size_per_layer_input=131,
            rope_parameters=dict(
                full_attention=dict(partial_rotary_factor=0.25, rope_theta=1000000.0, rope_type="proportional"),
                sliding_attention=dict(rope_theta=10000.0, rope_type="default"),
            ),
        ),
        transformers_version="5.5.0.dev0", video_token_id=129,
        vision_config=dict(head_dim=16, hidden_size=32, intermediate_size=32, model_type="gemma4_vision",
                           num_attention_heads=2, num_hidden_layers=1, num_key_value_heads=2, patch_size=4,
                           position_embedding_size=16),
    ),
    "mistral3": dict(
        architectures=["Mistral3ForConditionalGeneration"], image_token_index=125, model_type="mistral3",
        multimodal_projector_bias=False, projector_hidden_act="gelu", spatial_merge_size=2,
        text_config=TEXT | dict(
            attention_dropout=0.0, head_dim=16, hidden_act="silu", initializer_range=0.02, model_type="mistral",
            rms_norm_eps=1e-05, rope_theta=1000000000.0, sliding_window=None, use_cache=True,
        ),
        tie_word_embeddings=False, torch_dtype="float32", transformers_version="4.50.0.dev0", vision_feature_layer=-1,
        vision_config=TOWER | dict(head_dim=16, hidden_act="silu", model_type="pixtral", rope_theta=10000.0),
    ),
    "llama4": dict(
        architectures=["Llama4ForConditionalGeneration"], boi_token_index=126, eoi_token_index=127,
        image_token_index=125, model_type="llama4", tie_word_embeddings=False, torch_dtype="float32",
        text_config=TEXT | dict(
            attention_chunk_size=8, attn_scale=0.1, attn_temperature_tuning=True, floor_scale=8, head_dim=16,
            interleave_moe_layer_step=1, intermediate_size_mlp=72, model_type="llama4_text", no_rope_layers=[1, 0],
            num_local_experts=5, rms_norm_eps=1e-05, rope_theta=500000.0, use_qk_norm=True,
            rope_scaling=dict(factor=16.0, high_freq_factor=1.0, low_freq_factor=1.0,
                              original_max_position_embeddings=16, rope_type="llama3"),
        ),
        transformers_version="4.51.0.dev0",
        vision_config=dict(hidden_size=32, image_size=28, intermediate_size=128, model_type="llama4_vision_model",
                           num_attention_heads=2, num_hidden_layers=1, patch_size=14, projector_input_dim=48,
                           projector_output_dim=48, vision_output_dim=48),
    ),
    "llava": LLAVA,
    "llava_next": LLAVA | dict(
        architectures=["LlavaNextForConditionalGeneration"], model_type="llava_next", use_image_newline_parameter=True,
        text_config=TEXT | dict(model_type="mistral", rms_norm_eps=1e-05, rope_theta=1000000.0, sliding_window=None),
    ),
    "llava_onevision": LLAVA | dict(
        architectures=["LlavaOnevisionForConditionalGeneration"], model_type="llava_onevision", video_token_index=126,
        text_config=TEXT | dict(model_type="qwen2", rms_norm_eps=1e-06, rope_theta=1000000.0, use_sliding_window=False),
        vision_config=TOWER | dict(model_type="siglip_vision_model", vision_use_head=False),
    ),
    "vipllava": LLAVA | dict(
        architectures=["VipLlavaForConditionalGeneration"], model_type="vipllava", projector_layernorm_eps=1e-05,
        vision_feature_layers=[-2, -2],
    ),
    "idefics2": dict(
        architectures=["Idefics2ForConditionalGeneration"], image_token_id=125, model_type="idefics2",
        perceiver_config=dict(hidden_size=48, num_key_value_heads=1, resampler_depth=1, resampler_head_dim=8,
                              resampler_n_heads=2, resampler_n_latents=2),
        text_config=TEXT | dict(model_type="mistral", pad_token_id=0, rms_norm_eps=1e-5, sliding_window=4096),
        tie_word_embeddings=False, torch_dtype="float32", vision_config=TOWER | dict(model_type="idefics2"),
    ),
    "idefics3": IDEFICS3,
    "smolvlm": IDEFICS3 | dict(architectures=["SmolVLMForConditionalGeneration"], model_type="smolvlm"),
    "internvl": dict(
        architectures=["InternVLForConditionalGeneration"], downsample_ratio=0.5, image_token_id=125,
        model_type="internvl", text_config=TEXT | dict(model_type="qwen2", rms_norm_eps=1e-6, rope_theta=1000000.0),
        torch_dtype="float32", vision_config=TOWER | dict(image_size=[28, 28], patch_size=[14, 14]),
    ),
}  # fmt: skip

# A decoder of another family in a model that is above.
OTHERS = {
    "mistral3, with Mistral 4": ATTRIBUTES["mistral3"] | dict(
        text_config=TEXT | dict(
            attention_bias=False, first_k_dense_replace=0, hidden_act="silu", kv_lora_rank=20, model_type="mistral4",
            moe_intermediate_size=40, n_group=1, n_routed_experts=6, n_shared_experts=1, norm_topk_prob=True,
            num_experts_per_tok=2, num_key_value_heads=6, q_lora_rank=28, qk_nope_head_dim=12, qk_rope_head_dim=8,
            rms_norm_eps=1e-6, rope_interleave=True, routed_scaling_factor=1.0, tie_word_embeddings=False,
            topk_group=1, v_head_dim=10,
            rope_parameters=dict(
                beta_fast=32.0, beta_slow=1.0, factor=4.0, llama_4_scaling_beta=0.1, max_position_embeddings=64,
                mscale=1.0, mscale_all_dim=1.0, original_max_position_embeddings=16, partial_rotary_factor=0.4,
                rope_theta=10000.0, rope_type="yarn", type="yarn",
            ),
        )
    ),
}  # fmt: skip

# Qwen3-VL as it is published: the 2B model ties its head, the 8B model has another.
QWEN3_VL = {
    "Qwen/Qwen3-VL-2B-Instruct": ATTRIBUTES["qwen3_vl"],
    "Qwen/Qwen3-VL-8B-Instruct": ATTRIBUTES["qwen3_vl"] | dict(
        text_config=ATTRIBUTES["qwen3_vl"]["text_config"] | dict(tie_word_embeddings=False), tie_word_embeddings=False,
        vision_config=ATTRIBUTES["qwen3_vl"]["vision_config"] | dict(deepstack_visual_indexes=[0, 1]),
    ),
}  # fmt: skip
