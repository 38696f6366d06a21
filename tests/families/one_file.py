"""Tiny configurations of the families in one file: attributes by `model_type`, and variants that checkpoints use."""

from transformers import AutoConfig

SIZES = dict(
    vocab_size=131, hidden_size=48, intermediate_size=72, num_hidden_layers=2, num_attention_heads=6,
    num_key_value_heads=2, max_position_embeddings=64, pad_token_id=None,
)  # fmt: skip
WIDE = SIZES | dict(head_dim=16)
# With 24 in place of 128, scores are so sharp that Transformers' own f32 is 1e-5 away from f64.
GEMMA = WIDE | dict(query_pre_attn_scalar=128, attn_implementation="eager")
KINDS = ["sliding_attention", "full_attention"]
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16)
GROWING = YARN | dict(llama_4_scaling_beta=0.5, max_position_embeddings=64)
LLAMA3 = dict(
    rope_type="llama3", rope_theta=1e4, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=16,
)  # fmt: skip
DEFAULT = dict(rope_type="default", rope_theta=1e4)
PARTIAL = dict(rope_parameters=DEFAULT | dict(partial_rotary_factor=1.0))
GRANITE = dict(embedding_multiplier=3.0, residual_multiplier=0.4, attention_multiplier=0.2, logits_scaling=2.5)
SWA = dict(layer_types=KINDS, sliding_window=5, layer_rope_theta=[1e3, 5e5])
MINICPM = dict(scale_emb=3.0, scale_depth=0.9, dim_model_base=20)
EXPERTS = dict(moe_intermediate_size=40, num_experts_per_tok=2)
GROUPS = dict(n_routed_experts=12, num_experts_per_tok=3, n_group=4, topk_group=2)
LATENT = dict(
    num_key_value_heads=6, kv_lora_rank=20, q_lora_rank=28, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10
)
MSCALE = dict(rope_parameters=YARN | dict(mscale=0.8, mscale_all_dim=1.2))
OF_ERNIE = dict(moe_intermediate_size=40, moe_num_experts=5, moe_k=2)
SAME_KEYS = dict(num_key_value_heads=6)
TIED, UNTIED = dict(tie_word_embeddings=True), dict(tie_word_embeddings=False)
HYBRID = WIDE | dict(
    head_dim=32, layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2,
    linear_num_value_heads=6, linear_key_head_dim=16, linear_value_head_dim=24,
    rope_parameters=DEFAULT | dict(partial_rotary_factor=0.25, mrope_section=[2, 1, 1]),
)  # fmt: skip
CONVOLUTIONS = SIZES | dict(layer_types=["conv", "full_attention"])
MAMBA = SIZES | dict(mamba_n_heads=12, mamba_d_head=8, mamba_d_state=20)
# Heads of both kinds have the same size. Transformers makes time steps below time_step_min larger, in prompts only.
NEMOTRON_H = EXPERTS | dict(
    layers_block_type=["linear_attention", "moe", "full_attention", "mlp"], mamba_num_heads=12, mamba_head_dim=8,
    head_dim=8, ssm_state_size=20, n_groups=3, n_routed_experts=5, moe_shared_expert_intermediate_size=56,
    time_step_min=1e-9,
)  # fmt: skip
FACTORS = dict(
    embedding_multiplier=3.0, lm_head_multiplier=0.2, key_multiplier=0.7, attention_in_multiplier=0.8,
    attention_out_multiplier=1.4, ssm_in_multiplier=1.2, ssm_out_multiplier=0.6, mlp_multipliers=[0.7, 0.5],
    ssm_multipliers=[0.9, 1.3, 0.8, 1.2, 0.7],
)  # fmt: skip

# Families with other names of sizes.
FALCON = dict(
    vocab_size=131, hidden_size=48, ffn_hidden_size=72, num_hidden_layers=2, num_attention_heads=6, num_kv_heads=2,
    max_position_embeddings=64, pad_token_id=None, bos_token_id=0, eos_token_id=1,
)  # fmt: skip
GPT = dict(
    vocab_size=131, n_embd=48, n_inner=72, n_layer=2, n_head=6, n_positions=64, bos_token_id=0, eos_token_id=1,
)  # fmt: skip
NEO = dict(
    vocab_size=131, hidden_size=48, intermediate_size=72, num_layers=2, num_heads=6, max_position_embeddings=64,
    bos_token_id=0, eos_token_id=1,
)  # fmt: skip
MPT = dict(vocab_size=131, d_model=48, n_layers=2, n_heads=6, max_seq_len=64, use_cache=True)  # drafts need a cache

# The attributes of the plain case, and variants: changes by name.
FAMILIES = {
    "gemma": (WIDE, {"biases": dict(attention_bias=True), "all heads have keys": SAME_KEYS}),
    "gemma3_text": (
        GEMMA | dict(layer_types=KINDS, sliding_window=5),
        {
            "positions stretched in full layers": dict(
                rope_parameters=dict(
                    full_attention=dict(rope_type="linear", rope_theta=1e6, factor=8.0), sliding_attention=DEFAULT
                )
            ),
            "soft cap of logits": dict(final_logit_softcapping=5.0),
        },
    ),
    "vaultgemma": (
        GEMMA | dict(sliding_window=5, attn_logit_softcapping=3.0, final_logit_softcapping=5.0),
        {"no soft caps": dict(attn_logit_softcapping=None, final_logit_softcapping=None)},
    ),
    "smollm3": (
        SIZES | dict(no_rope_layer_interval=2),
        {
            "windows": dict(use_sliding_window=True, sliding_window=5),
            "stretched": dict(rope_parameters=YARN),
            "all rotate": dict(no_rope_layers=[1, 1]),
            "biases": dict(attention_bias=True, mlp_bias=True),
        },
    ),
    "granite": (SIZES | GRANITE, {"biases": dict(attention_bias=True, mlp_bias=True), "a tied head": TIED}),
    "granite_swa": (
        SIZES | GRANITE | SWA,
        {
            "windows alone rotate": dict(layer_rope_theta=[1e4, 0]),
            "one base, stretched": dict(layer_rope_theta=None, rope_parameters=YARN),
            "windows everywhere, biases": dict(
                layer_types=["sliding_attention"] * 2, attention_bias=True, mlp_bias=True
            ),
            "a head, keys of all heads": UNTIED | SAME_KEYS,
        },
    ),
    "hyperclovax": (SIZES | GRANITE, {"no norms after": dict(use_post_norm=False), "a head_dim": dict(head_dim=16)}),
    "ministral": (WIDE | dict(layer_types=KINDS, sliding_window=5), {"windows everywhere": dict(layer_types=None)}),
    "ministral3": (
        SIZES | dict(rope_parameters=GROWING),
        {"a window": dict(sliding_window=5), "a tied head": TIED},
    ),
    "cwm": (WIDE | dict(layer_types=KINDS, sliding_window=5, rope_parameters=LLAMA3), {"a tied head": TIED}),
    "seed_oss": (
        WIDE, {"all biases": dict(attention_out_bias=True, mlp_bias=True), "none": dict(attention_bias=False)}
    ),
    "internlm3": (WIDE, {"biases": dict(attention_bias=True, mlp_bias=True)}),
    "iquestcoder": (WIDE, {}),
    "olmo": (
        SIZES | dict(clip_qkv=1.5, eos_token_id=None),
        {"no limit": dict(clip_qkv=None), "all heads have keys": SAME_KEYS, "a tied head": TIED},
    ),
    "olmo2": (SIZES, {"all heads have keys": SAME_KEYS, "one head of keys": dict(num_key_value_heads=1)}),
    "olmo3": (
        SIZES | dict(layer_types=KINDS, sliding_window=5),
        {"stretched in full layers": dict(rope_parameters=dict(full_attention=YARN, sliding_attention=DEFAULT))},
    ),
    "phi": (SIZES, {"norms of queries and keys": dict(qk_layernorm=True), "all rotate": PARTIAL, "keys": SAME_KEYS}),
    "starcoder2": (SIZES, {"a window": dict(sliding_window=5), "no biases": dict(use_bias=False), "a head": UNTIED}),
    "stablelm": (
        SIZES | dict(rope_parameters=DEFAULT | dict(partial_rotary_factor=0.5)),
        {
            "parallel": dict(use_parallel_residual=True),
            "biases": dict(use_qkv_bias=True),
            "norms of each head": dict(qk_layernorm=True, use_parallel_residual=True),
        },
    ),
    "glm": (WIDE, {"no biases": dict(attention_bias=False), "all rotate": PARTIAL}),
    "glm4": (WIDE, {"no biases": dict(attention_bias=False), "all rotate": PARTIAL}),
    "cohere": (
        SIZES | dict(logit_scale=0.4),
        {"norms of queries and keys": dict(use_qk_norm=True), "a head": UNTIED, "biases": dict(attention_bias=True)},
    ),
    "cohere2": (SIZES | dict(logit_scale=0.4, layer_types=KINDS, sliding_window=5), {"keys": SAME_KEYS}),
    "cohere2_moe": (
        SIZES | dict(
            logit_scale=0.4, head_dim=8, layer_types=["full_attention", *KINDS], num_hidden_layers=3, sliding_window=5,
            mlp_layer_types=["dense", "sparse", "sparse"], prefix_dense_intermediate_size=56, num_experts=5,
            num_shared_experts=2, expert_selection_fn="sigmoid",
        ),
        {
            "shares by softmax, no shared experts": dict(expert_selection_fn="softmax", num_shared_experts=0),
            "a sum, shares are not normalized, RMS norms": dict(
                shared_expert_combination_strategy="sum", norm_topk_prob=False, rms_norm_eps=1e-5
            ),
            "a first layer that does not rotate, biases": dict(
                prefix_dense_sliding_window_pattern=2, prefix_dense_intermediate_size=None, attention_bias=True
            ),
            "experts everywhere, a head": UNTIED | dict(mlp_layer_types=["sparse"] * 3, expert_selection_fn="softmax"),
        },
    ),
    "exaone4": (
        SIZES | dict(layer_types=KINDS, sliding_window=5),
        {
            "no windows, so all rotate": dict(layer_types=["full_attention"] * 2, sliding_window=None),
            "stretched": dict(rope_parameters=LLAMA3),
        },
    ),
    "ernie4_5": (WIDE, {"biases": dict(use_bias=True), "a head": UNTIED}),
    "hunyuan_v1_dense": (
        WIDE,
        {"alpha": dict(rope_parameters=DEFAULT | dict(rope_type="dynamic", alpha=1000.0, factor=1.0)), "tied": TIED},
    ),
    "arcee": (SIZES, {"stretched": dict(rope_parameters=YARN), "biases": dict(mlp_bias=True)}),
    "apertus": (
        SIZES | dict(rope_parameters=LLAMA3),
        {"biases, all heads have keys": SAME_KEYS | dict(attention_bias=True), "not stretched, tied": TIED | dict(
            rope_parameters=DEFAULT
        )},
    ),
    "jais2": (SIZES, {"no biases": dict(attention_bias=False, mlp_bias=False)}),
    "nemotron": (SIZES, {"all rotate": PARTIAL, "biases": dict(mlp_bias=True)}),
    "qwen3_moe": (
        WIDE | dict(moe_intermediate_size=40, num_experts=5, num_experts_per_tok=2, norm_topk_prob=True),
        {
            "shares are not normalized": dict(norm_topk_prob=False),
            "biases": dict(attention_bias=True),
            "a window": dict(use_sliding_window=True, sliding_window=5),
            "many experts": dict(num_experts=40, num_experts_per_tok=8),
            "a layer without experts": dict(mlp_only_layers=[1]),
            "experts in every other layer, and a window": dict(
                decoder_sparse_step=2, use_sliding_window=True, sliding_window=5
            ),
        },
    ),
    "mellum": (
        WIDE | EXPERTS | dict(
            num_experts=5, layer_types=KINDS, sliding_window=5,
            rope_parameters=dict(full_attention=YARN, sliding_attention=DEFAULT | dict(rope_theta=5e5)),
        ),
        {
            "a layer without experts": dict(mlp_layer_types=["dense", "sparse"]),
            "no experts after full attention, biases": dict(mlp_layer_types=["sparse", "dense"], attention_bias=True),
            "shares are not normalized, a tied head": dict(norm_topk_prob=False, **TIED),
            "no windows, positions as they are": dict(layer_types=None, rope_parameters=None),
        },
    ),
    "olmoe": (
        SIZES | dict(num_experts=5, num_experts_per_tok=2, eos_token_id=None),
        {"shares are normalized": dict(norm_topk_prob=True), "biases": dict(attention_bias=True), "keys": SAME_KEYS},
    ),
    "qwen2_moe": (
        SIZES | EXPERTS | dict(num_experts=5, shared_expert_intermediate_size=56),
        {
            "shares are normalized": dict(norm_topk_prob=True),
            "no biases": dict(qkv_bias=False),
            "a layer without experts": dict(mlp_only_layers=[0]),
            "experts in every other layer, and windows": dict(
                decoder_sparse_step=2, use_sliding_window=True, sliding_window=5, max_window_layers=1
            ),
        },
    ),
    "glm4_moe": (
        WIDE | EXPERTS | dict(n_routed_experts=5, routed_scaling_factor=1.5),
        {
            "norms of queries and keys, biases": dict(use_qk_norm=True, attention_bias=True),
            "groups": GROUPS,
            "experts everywhere, two of them shared": dict(first_k_dense_replace=0, n_shared_experts=2),
            "shares are not normalized": dict(norm_topk_prob=False),
        },
    ),
    "dots1": (
        SIZES | EXPERTS | dict(n_routed_experts=5, n_shared_experts=2, first_k_dense_replace=1, norm_topk_prob=True),
        {
            "groups, shares are not normalized": GROUPS | dict(norm_topk_prob=False, routed_scaling_factor=2.5),
            "a layer with a window, biases": dict(max_window_layers=1, sliding_window=5, attention_bias=True),
        },
    ),
    "solar_open": (
        WIDE | EXPERTS | dict(n_routed_experts=5, routed_scaling_factor=1.5),
        {"groups": GROUPS, "biases": dict(attention_bias=True), "stretched": dict(rope_parameters=YARN)},
    ),
    "exaone_moe": (
        SIZES | EXPERTS | dict(num_experts=5, layer_types=KINDS, sliding_window=5),
        {
            "groups": dict(num_experts=12, num_experts_per_tok=3, n_group=4, topk_group=2),
            "a window in the layer with experts": dict(layer_types=KINDS[::-1]),
        },
    ),
    "afmoe": (
        WIDE | EXPERTS | dict(
            num_experts=5, layer_types=KINDS, sliding_window=5, num_shared_experts=1, route_scale=1.5, mup_enabled=True
        ),
        {
            "the embedding as it is, biases": dict(mup_enabled=False, attention_bias=True),
            "experts everywhere, two of them shared": dict(
                num_dense_layers=0, num_shared_experts=2, layer_types=KINDS[::-1]
            ),
            "stretched, many experts, a tied head": TIED | dict(
                rope_parameters=YARN, num_experts=40, num_experts_per_tok=8
            ),
        },
    ),
    "kolibri1": (
        WIDE | EXPERTS | dict(
            num_experts=5, shared_expert_intermediate_size=56, layer_types=KINDS, sliding_window=5
        ),
        {
            "shares are normalized, a tied head": dict(norm_topk_prob=True, **TIED),
            "windows everywhere, so all rotate": dict(layer_types=["sliding_attention"] * 2),
            "many experts, all heads have keys": SAME_KEYS | dict(num_experts=40, num_experts_per_tok=6),
        },
    ),
    "minimax_m2": (
        WIDE | dict(num_local_experts=5, num_experts_per_tok=2, rotary_dim=8),
        {"all rotate": dict(rotary_dim=16), "all heads have keys": SAME_KEYS},
    ),
    "granitemoe": (SIZES | GRANITE | dict(num_local_experts=5), {"a tied head": TIED}),
    "granitemoeshared": (
        SIZES | GRANITE | dict(num_local_experts=5, shared_intermediate_size=56),
        {"no shared block": dict(shared_intermediate_size=0), "biases": dict(attention_bias=True)},
    ),
    "granitemoe_swa": (
        SIZES | GRANITE | SWA | dict(num_local_experts=5, shared_intermediate_size=56),
        {
            "no shared block, windows alone rotate": dict(shared_intermediate_size=0, layer_rope_theta=[1e4, 0]),
            "one base, stretched, biases": dict(
                layer_rope_theta=None, rope_parameters=YARN, attention_bias=True
            ),
            "many experts, a tied head": TIED | dict(num_local_experts=40, num_experts_per_tok=8),
        },
    ),
    "ernie4_5_moe": (
        SIZES | OF_ERNIE,
        {
            "no shared experts": dict(moe_num_shared_experts=0),
            "a last layer with experts": dict(moe_layer_start_index=0, moe_layer_end_index=0),
            "experts in every other layer, biases": dict(
                moe_layer_start_index=0, moe_layer_interval=2, use_bias=True
            ),
            "a head": UNTIED,
        },
    ),
    "flex_olmo": (
        SIZES | dict(num_experts=5, num_experts_per_tok=3),
        {"shares are normalized": dict(norm_topk_prob=True), "keys": SAME_KEYS},
    ),
    "hy_v3": (
        WIDE | EXPERTS | dict(num_experts=5),
        {
            "two shared experts, biases": dict(num_shared_experts=2, attention_bias=True, mlp_bias=True),
            "a last layer without experts, a tied head": dict(mlp_layer_types=["sparse", "dense"], **TIED),
            "many experts everywhere": dict(
                num_experts=40, num_experts_per_tok=8, mlp_layer_types=["sparse"] * 2, router_scaling_factor=1.0
            ),
        },
    ),
    "hunyuan_v1_moe": (
        WIDE | dict(num_experts=5, moe_topk=2),
        {
            "a number for each layer": dict(moe_topk=[3, 3]),
            "alpha": dict(rope_parameters=DEFAULT | dict(rope_type="dynamic", alpha=1000.0, factor=1.0)),
        },
    ),
    "gpt_oss": (
        WIDE | dict(layer_types=KINDS, sliding_window=5, num_local_experts=5, num_experts_per_tok=2,
                    rope_parameters=YARN | dict(truncate=False)),
        {
            "no biases of attention": dict(attention_bias=False),
            "a tied head": TIED,
            "many experts": dict(num_local_experts=40, num_experts_per_tok=4),
            "the activation is limited": dict(swiglu_limit=0.5, swiglu_alpha=3.0),
            "windows everywhere": dict(layer_types=["sliding_attention"] * 2),
            "all heads have keys": SAME_KEYS,
        },
    ),
    "falcon": (
        FALCON,
        {
            "groups and two norms": dict(new_decoder_architecture=True),
            "groups and one norm": dict(new_decoder_architecture=True, num_ln_in_parallel_attn=1, **UNTIED),
            "one after the other": dict(parallel_attn=False, multi_query=False, num_kv_heads=6, bias=True),
        },
    ),
    "gpt_bigcode": (
        GPT, {"all heads have keys": dict(multi_query=False), "a head": UNTIED, "four times": dict(n_inner=None)}
    ),
    "gpt_neo": (
        NEO | dict(attention_types=[[["global", "local"], 1]], window_size=5),
        {"no windows": dict(attention_types=[[["global"], 2]]), "four times": dict(intermediate_size=None)},
    ),
    "codegen": (
        GPT | dict(n_embd=96, n_head=12, rotary_dim=6),
        {"whole heads turn": dict(rotary_dim=8), "four times": dict(n_inner=None), "a tied head": TIED},
    ),
    "mpt": (
        MPT,
        {
            "a limit": dict(attn_config=dict(clip_qkv=1.5)),
            "another scale": dict(attn_config=dict(softmax_scale=0.1)),
            "as many heads as a power of two": dict(n_heads=8),
        },
    ),
    "qwen3_5_text": (
        HYBRID,
        {
            "biases": dict(attention_bias=True),
            "a tied head": TIED,
            # With 16 features, a query and a key are at right angles, and the norm of a head enlarges rounding errors.
            "every head has its keys": dict(linear_num_key_heads=6, linear_key_head_dim=20),
            "a longer convolution": dict(linear_conv_kernel_dim=6),
        },
    ),
    "qwen3_5_moe_text": (
        HYBRID | EXPERTS | dict(num_experts=5, shared_expert_intermediate_size=56),
        {"many experts": dict(num_experts=40, num_experts_per_tok=8), "a tied head": TIED},
    ),
    "qwen3_next": (
        HYBRID | EXPERTS | dict(num_experts=5, shared_expert_intermediate_size=56),
        {
            "shares are not normalized": dict(norm_topk_prob=False),
            "a layer without experts": dict(mlp_only_layers=[1]),
            "experts in every other layer": dict(decoder_sparse_step=2),
        },
    ),
    "lfm2": (
        CONVOLUTIONS | dict(block_multiple_of=8),  # 48 inner features
        {
            "a longer convolution, biases": dict(conv_L_cache=5, conv_bias=True),
            "a multiplier": dict(block_ffn_dim_multiplier=1.3),
            "sizes as they are, a head": dict(block_auto_adjust_ff_dim=False, **UNTIED),
            "a list of layers with attention": dict(layer_types=None, full_attn_idxs=[0]),
        },
    ),
    "lfm2_moe": (
        CONVOLUTIONS | EXPERTS | dict(num_experts=5, num_dense_layers=1),
        {
            "no correction, experts with convolutions": dict(
                use_expert_bias=False, layer_types=["full_attention", "conv"]
            ),
            "experts everywhere, biases": dict(num_dense_layers=0, conv_bias=True),
            "shares are not normalized": dict(norm_topk_prob=False, routed_scaling_factor=1.5),
        },
    ),
    "lfm3": (
        CONVOLUTIONS | dict(
            layer_types=["conv", "sliding_attention", "full_attention"], num_hidden_layers=3, head_dim=8,
            sliding_window=5,
        ),
        {
            "no gates, no norms after": dict(use_attention_gate=False, use_sandwich_norm=False),
            "biases, a shorter convolution": dict(attention_bias=True, conv_bias=True, conv_L_cache=4),
            "a share of features turns in windows, a head": UNTIED | dict(
                rope_parameters=dict(
                    full_attention=DEFAULT,
                    sliding_attention=DEFAULT | dict(rope_type="proportional", partial_rotary_factor=0.25),
                )
            ),
            "no windows, all heads have keys": SAME_KEYS | dict(layer_types=["full_attention", "conv", "conv"]),
        },
    ),
    "granitemoehybrid": (
        MAMBA | GRANITE | dict(
            layer_types=["linear_attention", "full_attention"], num_local_experts=5, shared_intermediate_size=56,
            position_embedding_type="nope",
        ),
        {
            "no experts": dict(num_local_experts=0, tie_word_embeddings=True),
            "no experts, all attention, which rotates": dict(
                num_local_experts=0, layer_types=["full_attention"] * 2, position_embedding_type="rope"
            ),
            "groups, biases": dict(mamba_n_groups=3, mamba_proj_bias=True, attention_bias=True),
            "no bias of convolutions, which are longer": dict(mamba_conv_bias=False, mamba_d_conv=6),
        },
    ),
    "bamba": (
        MAMBA | dict(attn_layer_indices=[1]),
        {
            "groups, biases": dict(mamba_n_groups=3, mamba_proj_bias=True, attention_bias=True, mlp_bias=True),
            "attention everywhere, a tied head": dict(attn_layer_indices=[0, 1], **TIED),
        },
    ),
    "falcon_h1": (
        MAMBA | FACTORS | dict(mamba_d_ssm=96),
        {
            "norms after gates, groups": dict(mamba_rms_norm=True, mamba_norm_before_gate=False, mamba_n_groups=3),
            "norms before gates, biases": dict(mamba_rms_norm=True, attention_bias=True, mlp_bias=True),
            "no factors of projections, a tied head": dict(ssm_multipliers=None, mlp_multipliers=None, **TIED),
        },
    ),
    "nemotron_h": (
        SIZES | NEMOTRON_H,
        {
            "no experts, biases": dict(
                layers_block_type=["linear_attention", "mlp", "full_attention"], mlp_bias=True, use_bias=True
            ),
            "groups of experts, shares that are not normalized": GROUPS | dict(
                layers_block_type=["moe", "full_attention"], topk_group=2, norm_topk_prob=False,
                routed_scaling_factor=1.5,
            ),
            "one group, no bias of convolutions": dict(
                layers_block_type=["full_attention", "linear_attention"], n_groups=1, use_conv_bias=False
            ),
        },
    ),
    "deepseek_v2": (
        # With 5 experts, two tokens are so close that the number of Transformers' threads decides which one comes.
        SIZES | EXPERTS | LATENT | dict(n_routed_experts=7, first_k_dense_replace=1),
        {
            "queries of full rank, biases": dict(q_lora_rank=None, attention_bias=True, mlp_bias=True),
            "groups": GROUPS | dict(topk_method="group_limited_greedy", routed_scaling_factor=2.5),
            "groups that are not read, no layer without experts": GROUPS | dict(first_k_dense_replace=0),
            "stretched": MSCALE,
        },
    ),
    "deepseek_v3": (
        SIZES | EXPERTS | LATENT | GROUPS | dict(first_k_dense_replace=1),
        {
            "queries of full rank, biases": dict(q_lora_rank=None, attention_bias=True),
            "halves rotate": dict(rope_interleave=False),
            "one group, no layer without experts": dict(n_group=1, topk_group=1, first_k_dense_replace=0),
            "stretched": MSCALE,
        },
    ),
    "mistral4": (
        # Transformers has the share of a head that rotates in rope_parameters, too.
        SIZES | EXPERTS | LATENT | dict(
            n_routed_experts=5, rope_parameters=GROWING | dict(mscale=1.0, mscale_all_dim=1.0),
        ),
        {
            "groups, a first layer without experts": GROUPS | dict(first_k_dense_replace=1, n_shared_experts=2),
            "queries of full rank, biases": dict(q_lora_rank=None, attention_bias=True),
            "halves rotate, shares are not normalized": dict(
                rope_interleave=False, norm_topk_prob=False, routed_scaling_factor=2.5
            ),
        },
    ),
    "axk1": (
        SIZES | EXPERTS | LATENT | GROUPS,
        {
            "halves rotate, biases, one group": dict(
                rope_interleave=False, attention_bias=True, n_group=1, topk_group=1
            ),
            "a last layer without experts": dict(mlp_layer_types=["sparse", "dense"], n_shared_experts=2),
            "no layer without experts, stretched": dict(mlp_layer_types=["sparse"] * 2, **MSCALE),
        },
    ),
    "glm4_moe_lite": (
        SIZES | EXPERTS | LATENT | dict(n_routed_experts=5, routed_scaling_factor=1.5),
        {"groups, halves rotate": GROUPS | dict(rope_interleave=False), "a last layer without experts": dict(
            mlp_layer_types=["sparse", "dense"], attention_bias=True
        )},
    ),
    "youtu": (
        SIZES | LATENT,
        {"queries of full rank, a head": UNTIED | dict(q_lora_rank=None), "stretched": MSCALE},
    ),
    "nanochat": (
        SIZES,
        {
            "no soft cap of logits": dict(final_logit_softcapping=None),
            "biases, all heads have keys": dict(attention_bias=True, **SAME_KEYS),
            "a tied head": TIED,
        },
    ),
    "minicpm3": (
        SIZES | LATENT | MINICPM,
        {
            "queries of full rank, biases, a head": UNTIED | dict(
                q_lora_rank=None, attention_bias=True, mlp_bias=True
            ),
            "stretched, no factors": MSCALE | dict(scale_emb=1, scale_depth=None, dim_model_base=None),
            "other frequencies of long sequences": dict(
                rope_parameters=dict(
                    rope_type="longrope", rope_theta=1e4, long_factor=[1.0, 1.5, 2.0, 2.5],
                    short_factor=[1.0, 1.1, 1.2, 1.3], original_max_position_embeddings=16,
                )
            ),
        },
    ),
    "helium": (SIZES | dict(head_dim=8), {"biases": dict(attention_bias=True, mlp_bias=True)}),
}  # fmt: skip


NAMES = {model_type.replace("_", ""): model_type for model_type in FAMILIES}  # of the files
WITH_STATES = {
    "qwen35text",
    "qwen35moetext",
    "qwen3next",
    "lfm2",
    "lfm2moe",
    "lfm3",
    "granitemoehybrid",
    "bamba",
    "falconh1",
    "nemotronh",
}


def tiny(model_type, variant=None):
    """Return Transformers' configuration of a family, or of a variant of it."""
    attributes, variants = FAMILIES[model_type]
    return AutoConfig.for_model(model_type, **attributes | (variants[variant] if variant else {}))
