"""Configurations of the families in one file as they are published, with small sizes.

As in `published.py`. Those of StarCoder2, SmolLM3, EXAONE 4.0 32B and Ministral 3 were compared with copies in public
repositories, whole or in part, and the names of Command R7B's attributes that Transformers does not read. The rest is
written from memory.
"""

import math
from typing import Any

from published import GUESSES, QUANTIZED, V4, Published, but, longrope

COMMON = dict(
    attention_dropout=0.0, bos_token_id=1, eos_token_id=2, hidden_act="silu", hidden_size=48, initializer_range=0.02,
    intermediate_size=72, max_position_embeddings=64, num_attention_heads=6, num_hidden_layers=2,
    num_key_value_heads=2, torch_dtype="bfloat16", transformers_version=V4, use_cache=True, vocab_size=131,
)  # fmt: skip
KINDS = ["sliding_attention", "full_attention"]
LLAMA3 = dict(
    factor=16.0, high_freq_factor=4.0, low_freq_factor=1.0, original_max_position_embeddings=16, rope_type="llama3"
)


def of(architecture: str, model_type: str, *missing: str, **changes: Any) -> dict[str, Any]:
    return but(COMMON, *missing, architectures=[architecture], model_type=model_type, **changes)


# Gemma.

GEMMA = of(
    "GemmaForCausalLM", "gemma", attention_bias=False, head_dim=16, hidden_act="gelu", num_key_value_heads=1,
    pad_token_id=0, rms_norm_eps=1e-6, rope_scaling=None, rope_theta=10000.0,
)  # fmt: skip
GEMMA3 = of(
    "Gemma3ForCausalLM", "gemma3_text", "hidden_act", attention_bias=False, attn_logit_softcapping=None,
    cache_implementation="hybrid", eos_token_id=[1, 2], final_logit_softcapping=None, head_dim=16,
    hidden_activation="gelu_pytorch_tanh", num_key_value_heads=1, pad_token_id=0, query_pre_attn_scalar=128,
    rms_norm_eps=1e-6, rope_local_base_freq=10000.0, rope_scaling=None, rope_theta=1000000.0, sliding_window=8,
    sliding_window_pattern=2,
)  # fmt: skip
VAULT = but(
    GEMMA3, "cache_implementation", "rope_local_base_freq", "sliding_window_pattern",
    architectures=["VaultGemmaForCausalLM"], attn_logit_softcapping=50.0, final_logit_softcapping=30.0,
    layer_types=KINDS, model_type="vaultgemma", rope_theta=10000.0,
)  # fmt: skip
FIRST = {
    "google/gemma-2b": Published(GEMMA),
    "google/gemma-1.1-7b-it": Published(
        but(GEMMA, hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh", num_key_value_heads=6)
    ),
    "google/gemma-3-1b-it": Published(GEMMA3),
    "google/gemma-3-270m": Published(
        but(
            GEMMA3, "cache_implementation", "sliding_window_pattern", _sliding_window_pattern=2, layer_types=KINDS,
            use_bidirectional_attention=False,
        )
    ),
    "google/gemma-3-4b-it, its text part": Published(
        but(GEMMA3, rope_scaling=dict(factor=8.0, rope_type="linear"), num_key_value_heads=2)
    ),
    "google/vaultgemma-1b": Published(VAULT),
}  # fmt: skip

# Command R, GLM, EXAONE, Phi, StableLM, StarCoder2, Nemotron.

COHERE = of(
    "CohereForCausalLM", "cohere", attention_bias=False, layer_norm_eps=1e-5, logit_scale=0.0625,
    model_max_length=64, pad_token_id=0, pretraining_tp=1, rope_theta=8000000.0, use_qk_norm=False,
)  # fmt: skip
READ_BY_COHERE = dict(
    layer_switch=2, order_of_interleaved_layers="local_attn_first", position_embedding_type="rope_gptj",
    rotary_pct=1.0, use_embedding_sharing=True, use_gated_activation=True, use_parallel_block=True,
    use_parallel_embedding=True,
)  # fmt: skip
COHERE2 = of(
    "Cohere2ForCausalLM", "cohere2", attention_bias=False, cache_implementation="hybrid", head_dim=8,
    layer_norm_eps=1e-5, logit_scale=0.25, pad_token_id=0, rope_scaling=None, rope_theta=50000, sliding_window=8,
    sliding_window_pattern=2, **READ_BY_COHERE,
)  # fmt: skip
GLM = of(
    "GlmForCausalLM", "glm", attention_bias=True, eos_token_id=[2, 3, 4], head_dim=16, pad_token_id=2,
    partial_rotary_factor=0.5, rms_norm_eps=1.5625e-7, rope_theta=10000.0, tie_word_embeddings=False,
)  # fmt: skip
EXAONE = of(
    "Exaone4ForCausalLM", "exaone4", head_dim=8, layer_types=KINDS, pad_token_id=0, rms_norm_eps=1e-5,
    rope_scaling=LLAMA3, rope_theta=1000000, sliding_window=8, sliding_window_pattern="LG", tie_word_embeddings=False,
)  # fmt: skip
PHI = of(
    "PhiForCausalLM", "phi", bos_token_id=None, embd_pdrop=0.0, eos_token_id=None, hidden_act="gelu_new",
    layer_norm_eps=1e-5, num_key_value_heads=None, partial_rotary_factor=0.5, qk_layernorm=False, resid_pdrop=0.0,
    rope_scaling=None, rope_theta=10000.0, tie_word_embeddings=False, torch_dtype="float16",
)  # fmt: skip
STABLE = of(
    "StableLmForCausalLM", "stablelm", hidden_dropout=0.0, layer_norm_eps=1e-5, num_key_value_heads=6,
    partial_rotary_factor=0.25, hidden_size=96, rope_theta=10000, tie_word_embeddings=False, use_qkv_bias=True,
)  # fmt: skip
STARCODER2 = of(
    "Starcoder2ForCausalLM", "starcoder2", hidden_act="gelu_pytorch_tanh", mlp_type="default", norm_epsilon=1e-5,
    norm_type="layer_norm", rope_theta=999999.4420358813, sliding_window=8, use_bias=True,
)  # fmt: skip
NEMOTRON = of(
    "NemotronForCausalLM", "nemotron", attention_bias=False, head_dim=8, hidden_act="relu2", mlp_bias=False,
    norm_eps=1e-5, pad_token_id=None, partial_rotary_factor=0.5, rope_theta=10000.0, tie_word_embeddings=False,
)  # fmt: skip
SECOND = {
    "CohereForAI/c4ai-command-r-v01": Published(COHERE, ("model_max_length", "pretraining_tp")),
    "CohereForAI/c4ai-command-r-plus": Published(
        but(COHERE, "pretraining_tp", use_qk_norm=True, logit_scale=0.8333333333333334), ("model_max_length",)
    ),
    "CohereForAI/aya-23-8B": Published(but(COHERE, "pretraining_tp", rope_theta=10000), ("model_max_length",)),
    "CohereForAI/c4ai-command-r7b-12-2024": Published(COHERE2, ("cache_implementation", *READ_BY_COHERE)),
    "THUDM/glm-4-9b-hf": Published(GLM),
    "THUDM/glm-4-9b, with its own code": Published(
        but(GLM, model_type="chatglm"), refused="model_type 'chatglm' is not supported; expected one of"
    ),
    "THUDM/GLM-4-9B-0414": Published(
        but(
            GLM, architectures=["Glm4ForCausalLM"], attention_bias=False, model_type="glm4", rms_norm_eps=1e-5,
        )
    ),
    "LGAI-EXAONE/EXAONE-4.0-32B": Published(EXAONE),
    "LGAI-EXAONE/EXAONE-4.0-1.2B": Published(
        but(
            EXAONE, layer_types=["full_attention"] * 2, sliding_window=None, sliding_window_pattern=None,
            tie_word_embeddings=True,
        )
    ),
    "microsoft/phi-1_5": Published(PHI),
    "microsoft/phi-2": Published(
        but(PHI, hidden_size=120, num_key_value_heads=6, partial_rotary_factor=0.4, resid_pdrop=0.1)
    ),
    "stabilityai/stablelm-2-1_6b": Published(STABLE),
    "stabilityai/stablelm-zephyr-3b": Published(but(STABLE, use_qkv_bias=False)),
    "stabilityai/stablelm-2-12b": Published(
        but(STABLE, num_key_value_heads=2, qk_layernorm=True, use_parallel_residual=True, use_qkv_bias=False)
    ),
    "bigcode/starcoder2-3b": Published(
        but(STARCODER2, attention_dropout=0.1, embedding_dropout=0.1, residual_dropout=0.1), ("mlp_type", "norm_type")
    ),
    "bigcode/starcoder2-15b": Published(
        but(
            STARCODER2, _name_or_path="/aot/checkpoints/15b/config.json", rms_norm_eps=1e-5, rope_theta=100000,
            tie_word_embeddings=False,
        ),
        ("mlp_type", "norm_type"),
    ),
    "nvidia/Minitron-4B-Base": Published(NEMOTRON),
    "nvidia/Nemotron-Mini-4B-Instruct": Published(but(NEMOTRON, rope_scaling=None)),
}  # fmt: skip

# OLMo, and decoders that are closest to LLaMA.

OLMO = of(
    "OlmoForCausalLM", "olmo", attention_bias=False, clip_qkv=None, num_key_value_heads=6, pad_token_id=1,
    rope_scaling=None, rope_theta=10000.0, tie_word_embeddings=False,
)  # fmt: skip
OLMO2 = but(OLMO, "clip_qkv", architectures=["Olmo2ForCausalLM"], model_type="olmo2", rms_norm_eps=1e-6, rope_theta=5e5)
OLMO3 = but(
    OLMO2, architectures=["Olmo3ForCausalLM"], layer_types=KINDS, model_type="olmo3", sliding_window=8,
    rope_scaling=dict(
        attention_factor=1.2079441541679836, beta_fast=32.0, beta_slow=1.0, factor=8.0,
        original_max_position_embeddings=16, rope_type="yarn",
    ),
)  # fmt: skip
OLMOE = but(
    OLMO, architectures=["OlmoeForCausalLM"], model_type="olmoe", norm_topk_prob=False, num_experts=5,
    num_experts_per_tok=2, output_router_logits=False, rms_norm_eps=1e-5, router_aux_loss_coef=0.01,
)  # fmt: skip
QWEN3_MOE = of(
    "Qwen3MoeForCausalLM", "qwen3_moe", attention_bias=False, decoder_sparse_step=1, head_dim=16, max_window_layers=2,
    mlp_only_layers=[], moe_intermediate_size=40, norm_topk_prob=True, num_experts=5, num_experts_per_tok=2,
    output_router_logits=False, rms_norm_eps=1e-6, rope_scaling=None, rope_theta=1000000.0,
    router_aux_loss_coef=0.001, sliding_window=None, tie_word_embeddings=False, use_sliding_window=False,
)  # fmt: skip
MELLUM = of(
    "MellumForCausalLM", "mellum", "torch_dtype", attention_bias=False, dtype="bfloat16", head_dim=16,
    layer_types=KINDS, max_window_layers=0, mlp_layer_types=["sparse"] * 2, moe_intermediate_size=40,
    norm_topk_prob=True, num_experts=5, num_experts_per_tok=2, output_router_logits=False, rms_norm_eps=1e-6,
    rope_parameters=dict(
        full_attention=dict(
            attention_factor=1.2772588722239782, beta_fast=32.0, beta_slow=1.0, factor=16.0,
            original_max_position_embeddings=16, rope_theta=500000.0, rope_type="yarn",
        ),
        sliding_attention=dict(rope_theta=500000.0, rope_type="default"),
    ),
    router_aux_loss_coef=0.001, sliding_window=8, tie_word_embeddings=False, transformers_version="5.10.0.dev0",
    use_sliding_window=True,
)  # fmt: skip
GRANITE = of(
    "GraniteForCausalLM", "granite", attention_bias=False, attention_dropout=0.1, attention_multiplier=0.2,
    embedding_multiplier=12.0, logits_scaling=8.0, mlp_bias=False, pad_token_id=0, residual_multiplier=0.22,
    rms_norm_eps=1e-5, rope_scaling=None, rope_theta=10000000.0, tie_word_embeddings=True,
)  # fmt: skip
GRANITE_SWA = but(
    GRANITE, "rope_scaling", "rope_theta", "torch_dtype", architectures=["GraniteSWAForCausalLM"],
    attention_dropout=0.0, dtype="bfloat16", layer_rope_theta=[0, 10000.0], layer_types=KINDS[::-1],
    model_type="granite_swa", rope_parameters=dict(rope_theta=10000.0, rope_type="default"), sliding_window=8,
)  # fmt: skip
GRANITE_MOE_SWA = but(
    GRANITE_SWA, "mlp_bias", architectures=["GraniteMoeSWAForCausalLM"], model_type="granitemoe_swa",
    num_experts_per_tok=2, num_local_experts=6, output_router_logits=False, router_aux_loss_coef=0.01,
    shared_intermediate_size=40,
)  # fmt: skip
CLOVA = but(
    GRANITE, architectures=["HyperCLOVAXForCausalLM"], auto_map=dict(AutoConfig="configuration.HyperCLOVAXConfig"),
    embd_pdrop=0.0, head_dim=8, model_type="hyperclovax", resid_pdrop=0.0, tie_word_embeddings=False,
    use_post_norm=True,
)  # fmt: skip
SMOLLM3 = of(
    "SmolLM3ForCausalLM", "smollm3", attention_bias=False, bos_token_id=None, layer_types=["full_attention"] * 2,
    max_window_layers=2, mlp_bias=False, no_rope_layer_interval=2, no_rope_layers=[1, 0], pad_token_id=2,
    pretraining_tp=2, rms_norm_eps=1e-6, rope_scaling=None, rope_theta=5000000.0, sliding_window=None,
    tie_word_embeddings=True, use_sliding_window=False,
)  # fmt: skip
MINISTRAL = of(
    "MistralForCausalLM", "mistral", head_dim=16, rms_norm_eps=1e-5, rope_theta=100000000.0, sliding_window=8,
    tie_word_embeddings=False,
)  # fmt: skip
MINISTRAL3 = but(
    MINISTRAL, "rope_theta", architectures=["Ministral3ForCausalLM"], model_type="ministral3", sliding_window=None,
    rope_parameters=dict(
        beta_fast=32.0, beta_slow=1.0, factor=16.0, llama_4_scaling_beta=0.1, mscale=1.0, mscale_all_dim=1.0,
        original_max_position_embeddings=16, rope_theta=1000000.0, rope_type="yarn", type="yarn",
    ),
)  # fmt: skip
HUNYUAN_ONLY = dict(attention_head_dim=16, class_num=0, norm_type="rms", pool_type="last", use_cla=False)
HUNYUAN = of(
    "HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", attention_bias=False, eod_token_id=3, head_dim=16, pad_token_id=4,
    pretraining_tp=1, rms_norm_eps=1e-5, rope_theta=10000.0, tie_word_embeddings=True, **HUNYUAN_ONLY,
    rope_scaling=dict(
        alpha=1000.0, beta_fast=32, beta_slow=1, factor=1.0, mscale=1.0, mscale_all_dim=0.0, type="dynamic"
    ),
)  # fmt: skip
THIRD = {
    "allenai/OLMo-7B-hf": Published(OLMO),
    "allenai/OLMo-1B-hf": Published(but(OLMO, tie_word_embeddings=True)),
    "allenai/OLMo-7B-0424-hf": Published(but(OLMO, clip_qkv=8.0)),
    "allenai/OLMo-2-1124-7B": Published(OLMO2),
    "allenai/OLMo-2-0325-32B": Published(but(OLMO2, num_key_value_heads=2)),
    "allenai/Olmo-3-1025-7B": Published(OLMO3),
    "allenai/OLMoE-1B-7B-0924": Published(OLMOE),
    "Qwen/Qwen3-30B-A3B": Published(QWEN3_MOE),
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": Published(
        but(QWEN3_MOE, qkv_bias=False, rope_theta=10000000, shared_expert_intermediate_size=0, use_qk_norm=True),
        ("qkv_bias", "shared_expert_intermediate_size", "use_qk_norm"),
    ),
    "JetBrains/Mellum2-12B-A2.5B-Base": Published(
        MELLUM, ("max_window_layers", "use_sliding_window"), buffers=("mtp.layers.0.input_layernorm.weight",)
    ),
    "ibm-granite/granite-3.3-2b-instruct": Published(GRANITE),
    "ibm-granite/granite-swash-2b": Published(GRANITE_SWA),
    "ibm-granite/granite-swash-3b-a600m": Published(GRANITE_MOE_SWA),
    "naver-hyperclovax/HyperCLOVAX-SEED-Think-14B": Published(CLOVA),
    "HuggingFaceTB/SmolLM3-3B": Published(SMOLLM3, ("pretraining_tp",)),
    "mistralai/Ministral-8B-Instruct-2410": Published(MINISTRAL),
    "mistralai/Ministral-8B-Instruct-2410, with its own type": Published(
        but(MINISTRAL, architectures=["MinistralForCausalLM"], layer_types=KINDS, model_type="ministral")
    ),
    "mistralai/Ministral-3-3B, its text part": Published(MINISTRAL3),
    "ByteDance-Seed/Seed-OSS-36B-Instruct": Published(
        of(
            "SeedOssForCausalLM", "seed_oss", attention_bias=True, attention_dropout=0.1, attention_out_bias=False,
            head_dim=16, mlp_bias=False, pad_token_id=1, residual_dropout=0.1, rms_norm_eps=1e-6,
            rope_scaling=dict(rope_type="default"), rope_theta=10000000.0, tie_word_embeddings=False,
        )
    ),
    "internlm/internlm3-8b-instruct": Published(
        of(
            "InternLM3ForCausalLM", "internlm3", auto_map=dict(AutoModel="modeling_internlm3.InternLM3Model"),
            bias=False, head_dim=16, pad_token_id=2, qkv_bias=False, rms_norm_eps=1e-5, rope_theta=50000000,
            rope_scaling=dict(factor=6.0, rope_type="dynamic"), tie_word_embeddings=False,
        )
    ),
    "baidu/ERNIE-4.5-0.3B-PT": Published(
        of(
            "Ernie4_5ForCausalLM", "ernie4_5", head_dim=16, pad_token_id=0, rms_norm_eps=1e-5, rope_theta=500000.0,
            tie_word_embeddings=True, use_bias=False,
        )
    ),
    "tencent/Hunyuan-0.5B-Instruct": Published(HUNYUAN, tuple(HUNYUAN_ONLY)),
    "arcee-ai/AFM-4.5B": Published(
        of(
            "ArceeForCausalLM", "arcee", attention_bias=False, head_dim=8, hidden_act="relu2", mlp_bias=False,
            rms_norm_eps=1e-5, rope_theta=10000.0, tie_word_embeddings=False,
            rope_scaling=dict(
                beta_fast=32.0, beta_slow=1.0, factor=4.0, mscale=1.0, original_max_position_embeddings=16,
                rope_type="yarn",
            ),
        )
    ),
    "swiss-ai/Apertus-8B-Instruct-2509": Published(
        of(
            "ApertusForCausalLM", "apertus", attention_bias=False, hidden_act="xielu", hidden_dropout=0.0,
            mlp_bias=False, pad_token_id=3, post_norm=False, qk_norm=True, rms_norm_eps=1e-5, rope_scaling=LLAMA3,
            rope_theta=12000000, tie_word_embeddings=False,
        ),
        ("mlp_bias", "qk_norm"),
    ),
    "kyutai/helium-1-2b": Published(
        of(
            "HeliumForCausalLM", "helium", attention_bias=False, head_dim=8, mlp_bias=False, pad_token_id=3,
            rms_norm_eps=1e-8, rope_theta=20000.0, tie_word_embeddings=False,
        )
    ),
    "karpathy/nanochat-d32": Published(
        of(
            "NanoChatForCausalLM", "nanochat", attention_bias=False, final_logit_softcapping=15.0, hidden_act="relu2",
            num_key_value_heads=6, pad_token_id=1, rms_norm_eps=1e-6, rope_theta=10000.0, tie_word_embeddings=False,
        )
    ),
    "facebook/cwm": Published(
        of(
            "CwmForCausalLM", "cwm", head_dim=16, layer_types=KINDS, rms_norm_eps=1e-5, rope_scaling=LLAMA3,
            rope_theta=1000000.0, sliding_window=8, tie_word_embeddings=False,
        )
    ),
    "inceptionai/Jais-2-8B-Chat": Published(
        of(
            "Jais2ForCausalLM", "jais2", attention_bias=True, head_dim=8, hidden_act="relu2", layer_norm_eps=1e-5,
            mlp_bias=True, rope_scaling=None, rope_theta=500000.0, tie_word_embeddings=False,
        )
    ),
}  # fmt: skip

# Falcon, MPT, and relatives of GPT-2 and GPT-J.

SUMMARY = dict(
    summary_activation=None, summary_first_dropout=0.1, summary_proj_to_labels=True, summary_type="cls_index",
    summary_use_proj=True,
)  # fmt: skip
FALCON = but(
    COMMON, "intermediate_size", "num_key_value_heads", "hidden_act", "max_position_embeddings", alibi=False,
    apply_residual_connection_post_layernorm=False, architectures=["FalconForCausalLM"], bias=False,
    hidden_dropout=0.0, layer_norm_epsilon=1e-5, model_type="falcon", multi_query=True,
    new_decoder_architecture=False, num_kv_heads=6, parallel_attn=True,
)  # fmt: skip
STRAY = ("apply_residual_connection_post_layernorm",)
RUNNER = dict(inference_runner=0, pad_key_length=True, pre_allocate_kv_cache=False, validate_runner_input=True)
STARCODER = dict(
    activation_function="gelu", architectures=["GPTBigCodeForCausalLM"], attention_softmax_in_fp32=True,
    attn_pdrop=0.1, bos_token_id=0, embd_pdrop=0.1, eos_token_id=0, initializer_range=0.02, layer_norm_epsilon=1e-5,
    max_batch_size=None, max_sequence_length=None, model_type="gpt_bigcode", multi_query=True, n_embd=48, n_head=6,
    n_inner=72, n_layer=2, n_positions=64, resid_pdrop=0.1, scale_attention_softmax_in_fp32=True,
    scale_attn_weights=True, use_cache=True, vocab_size=131, **SUMMARY, **RUNNER,
)  # fmt: skip
NEO = dict(
    activation_function="gelu_new", architectures=["GPTNeoForCausalLM"], attention_dropout=0,
    attention_layers=["global", "local"], attention_types=[[["global", "local"], 1]], bos_token_id=0, embed_dropout=0,
    eos_token_id=0, gradient_checkpointing=False, hidden_size=48, initializer_range=0.02, intermediate_size=None,
    layer_norm_epsilon=1e-5, max_position_embeddings=64, model_type="gpt_neo", num_heads=6, num_layers=2,
    resid_dropout=0, transformers_version="4.10.0.dev0", use_cache=True, vocab_size=131, window_size=8, **SUMMARY,
)  # fmt: skip
CODEGEN = dict(
    activation_function="gelu_new", architectures=["CodeGenForCausalLM"], attn_pdrop=0.0, bos_token_id=1,
    embd_pdrop=0.0, eos_token_id=0, gradient_checkpointing=False, initializer_range=0.02, layer_norm_epsilon=1e-5,
    model_type="codegen", n_ctx=64, n_embd=64, n_head=8, n_inner=None, n_layer=2, n_positions=64, resid_pdrop=0.0,
    rotary_dim=4, scale_attn_weights=True, tie_word_embeddings=False, tokenizer_class="GPT2Tokenizer",
    torch_dtype="float16", use_cache=True, vocab_size=131, **SUMMARY,
)  # fmt: skip
MPT_ATTENTION = dict(
    alibi=True, alibi_bias_max=8, attn_impl="torch", attn_pdrop=0, attn_type="multihead_attention",
    attn_uses_sequence_id=False, clip_qkv=None, prefix_lm=False, qk_ln=False, softmax_scale=None,
)  # fmt: skip
MPT_ONLY = dict(init_config=dict(name="kaiming_normal_"), tokenizer_name="EleutherAI/gpt-neox-20b", verbose=0)
MPT = dict(
    architectures=["MPTForCausalLM"], attn_config=MPT_ATTENTION, auto_map=dict(AutoConfig="configuration_mpt.Config"),
    d_model=48, emb_pdrop=0, embedding_fraction=1.0, expansion_ratio=4, init_device="cpu", learned_pos_emb=True,
    logit_scale=None, max_seq_len=64, model_type="mpt", n_heads=6, n_layers=2, no_bias=True,
    norm_type="low_precision_layernorm", resid_pdrop=0, torch_dtype="bfloat16", use_cache=False, vocab_size=131,
    **MPT_ONLY,
)  # fmt: skip
FOURTH = {
    "tiiuae/falcon-7b": Published(FALCON, STRAY),
    "tiiuae/falcon-40b": Published(but(FALCON, new_decoder_architecture=True, num_kv_heads=2), STRAY),
    "tiiuae/falcon-11B": Published(
        but(
            FALCON, *STRAY, activation="gelu", ff_factor=2, ffn_hidden_size=96, max_position_embeddings=64,
            new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1, rope_scaling=None,
            rope_theta=500042.0, tie_word_embeddings=False,
        ),
        ("ff_factor",),
    ),
    "tiiuae/falcon-rw-1b": Published(
        but(FALCON, alibi=True, bias=True, multi_query=False, parallel_attn=False),
        refused="the falcon configuration has alibi=True; supported: False",
    ),
    "bigcode/starcoder": Published(STARCODER, tuple(RUNNER)),
    "bigcode/gpt_bigcode-santacoder": Published(but(STARCODER, *RUNNER, activation_function="gelu_fast")),
    "EleutherAI/gpt-neo-125m": Published(
        NEO, buffers=("transformer.h.0.attn.attention.bias", "transformer.h.1.attn.attention.masked_bias")
    ),
    "Salesforce/codegen-350M-mono": Published(CODEGEN, buffers=("transformer.h.0.attn.causal_mask",)),
    "mosaicml/mpt-7b": Published(MPT, tuple(MPT_ONLY)),
    "mosaicml/mpt-7b-8k": Published(
        but(MPT, attn_config=MPT_ATTENTION | dict(clip_qkv=6)),
        refused="(?s)Transformers rejects the mpt configuration: Validation error for field 'clip_qkv'",
    ),
    "mosaicml/mpt-7b-8k, with a limit that Transformers takes": Published(
        but(MPT, attn_config=MPT_ATTENTION | dict(clip_qkv=6.0)), tuple(MPT_ONLY)
    ),
    "mosaicml/mpt-7b-storywriter": Published(
        but(MPT, attn_config=MPT_ATTENTION | dict(alibi_bias_max=16)),
        refused="attn_config of the mpt configuration has alibi_bias_max=16; supported: 8",
    ),
}  # fmt: skip

# Hybrids, and more mixtures.

EXPERTS = dict(moe_intermediate_size=40, num_experts_per_tok=2)
HYBRID = of(
    "Qwen3NextForCausalLM", "qwen3_next", attention_bias=False, full_attention_interval=2, head_dim=32,
    linear_conv_kernel_dim=4, linear_key_head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4,
    linear_value_head_dim=16, partial_rotary_factor=0.25, rms_norm_eps=1e-6, rope_scaling=None, rope_theta=10000000,
    tie_word_embeddings=False,
)  # fmt: skip
NEXT = EXPERTS | HYBRID | dict(
    decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=True, num_experts=6, output_router_logits=False,
    router_aux_loss_coef=0.001, shared_expert_intermediate_size=40, use_sliding_window=False,
)  # fmt: skip
TEXT = but(
    HYBRID, "rope_scaling", "rope_theta", architectures=["Qwen3_5ForCausalLM"], attn_output_gate=True,
    layer_types=["linear_attention", "full_attention"], mamba_ssm_dtype="float32", model_type="qwen3_5_text",
    mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False,
    rope_parameters=dict(
        mrope_interleaved=True, mrope_section=[2, 1, 1], partial_rotary_factor=0.25, rope_theta=10000000,
        rope_type="default",
    ),
)  # fmt: skip
ALSO = ("attn_output_gate", "mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
GUESSING = ("mtp.fc.weight", "mtp.layers.0.self_attn.q_proj.weight")
CONVOLUTIONS = of(
    "Lfm2ForCausalLM", "lfm2", "hidden_act", "attention_dropout", block_auto_adjust_ff_dim=True,
    block_ffn_dim_multiplier=1.0, block_multiple_of=8, conv_L_cache=3, conv_bias=False, full_attn_idxs=[1],
    norm_eps=1e-5, num_heads=6, pad_token_id=0, rope_theta=1000000.0,
)  # fmt: skip
OF_LIQUID = dict(
    block_dim=48, block_mlp_init_scale=1.0, block_norm_eps=1e-5, block_out_init_scale=1.0, block_use_swiglu=True,
    block_use_xavier_init=True, conv_dim=48, conv_dim_out=48, conv_use_xavier_init=True, use_pos_enc=True,
)  # fmt: skip
LFM3 = of(
    "Lfm3ForCausalLM", "lfm3", "hidden_act", attention_bias=False, conv_L_cache=7, conv_bias=False, head_dim=8,
    layer_types=["conv", "sliding_attention", "full_attention"], norm_eps=1e-5, num_hidden_layers=3, pad_token_id=0,
    rope_parameters=dict(
        full_attention=dict(partial_rotary_factor=0.5, rope_theta=1000000.0, rope_type="proportional"),
        sliding_attention=dict(rope_theta=10000.0, rope_type="default"),
    ),
    sliding_window=8, tie_word_embeddings=True, use_attention_gate=True, use_sandwich_norm=True,
)  # fmt: skip
GRANITE4 = but(
    GRANITE, "mlp_bias", "rope_scaling", architectures=["GraniteMoeHybridForCausalLM"], init_method="mup",
    layer_types=["mamba", "attention"], logits_scaling=16, mamba_chunk_size=256, mamba_conv_bias=True, mamba_d_conv=4,
    mamba_d_head=16, mamba_d_state=16, mamba_expand=2, mamba_n_groups=1, mamba_n_heads=6, mamba_proj_bias=False,
    model_type="granitemoehybrid", normalization_function="rmsnorm", num_experts_per_tok=2, num_local_experts=6,
    output_router_logits=False, position_embedding_type="nope", router_aux_loss_coef=0.01,
    shared_intermediate_size=40, rope_theta=10000,
)  # fmt: skip
BAMBA = of(
    "BambaForCausalLM", "bamba", attention_bias=False, attn_layer_indices=[1], mamba_chunk_size=256,
    mamba_conv_bias=True, mamba_d_conv=4, mamba_d_head=16, mamba_d_state=16, mamba_expand=2, mamba_n_groups=1,
    mamba_n_heads=6, mamba_proj_bias=False, mlp_bias=False, num_logits_to_keep=1, pad_token_id=0, rms_norm_eps=1e-5,
    rope_scaling=None, rope_theta=10000.0, tie_word_embeddings=False,
)  # fmt: skip
H1 = but(
    BAMBA, "attn_layer_indices", architectures=["FalconH1ForCausalLM"], attention_in_multiplier=1.0,
    attention_out_multiplier=0.9375, embedding_multiplier=5.656854249492381, key_multiplier=0.39,
    lm_head_multiplier=0.0390625, mamba_d_ssm=96, mamba_norm_before_gate=False, mamba_rms_norm=False,
    mlp_expansion_factor=8, mamba_use_mlp=True, mlp_multipliers=[0.88, 0.59], model_type="falcon_h1",
    projectors_bias=False, rope_theta=100000000000.0, ssm_in_multiplier=1.25, ssm_out_multiplier=0.235,
    ssm_multipliers=[0.35, 0.25, 0.17, 0.5, 0.31],
)  # fmt: skip
NEMOTRON_H = of(
    "NemotronHForCausalLM", "nemotron_h", "hidden_act", attention_bias=False, chunk_size=128, conv_kernel=4, expand=2,
    head_dim=8, hidden_dropout=0.0, hybrid_override_pattern="M-*-", layer_norm_epsilon=1e-5,
    mamba_head_dim=8, mamba_hidden_act="silu", mamba_num_heads=6, mamba_proj_bias=False, mlp_bias=False,
    mlp_hidden_act="relu2", n_groups=2, num_hidden_layers=4, num_logits_to_keep=1, pad_token_id=0,
    rescale_prenorm_residual=True, residual_in_fp32=False, rms_norm_eps=1e-5, sliding_window=None, ssm_state_size=16,
    tie_word_embeddings=False, time_step_floor=0.0001, time_step_limit=[0.0, math.inf], time_step_max=0.1,
    time_step_min=0.001, use_bias=False, use_conv_bias=True, use_mamba_kernels=True,
)  # fmt: skip
NANO3 = but(
    NEMOTRON_H, "rms_norm_eps", hybrid_override_pattern="ME*E", intermediate_size=40, mamba_ssm_cache_dtype="float32",
    moe_intermediate_size=40, moe_shared_expert_intermediate_size=80, n_group=1, n_routed_experts=6,
    n_shared_experts=1, norm_eps=1e-5, norm_topk_prob=True, num_experts_per_tok=2, partial_rotary_factor=1.0,
    rope_theta=10000, routed_scaling_factor=2.5, topk_group=1,
)  # fmt: skip
OF_ARCEE = dict(
    load_balance_coeff=0.001, n_group=1, num_expert_groups=1, num_limited_groups=1, route_norm=True,
    score_func="sigmoid", topk_group=1, use_grouped_mm=True,
)  # fmt: skip
IN_BLOCKS = dict(stored=("float", (128, 128), "_scale_inv"))
MORE_LAYERS = tuple(f"model.layers.2.{name}" for name in GUESSES)
OF_TENCENT = dict(
    enable_attention_fp32_softmax=False, enable_lm_head_fp32=True, eod_token_id=3, expert_hidden_dim=40,
    moe_router_enable_expert_bias=True, moe_router_use_sigmoid=True, qk_norm=True, route_norm=True,
    use_grouped_mm=False,
)  # fmt: skip
OF_TII = ("mamba_use_mlp", "mlp_expansion_factor")
OF_IBM = ("init_method", "normalization_function")
FIFTH = {
    "ibm-ai-platform/Bamba-9B-v2": Published(BAMBA),
    "tiiuae/Falcon-H1-1.5B-Instruct": Published(H1, OF_TII),
    "tiiuae/Falcon-H1-34B-Instruct": Published(but(H1, mamba_n_groups=2, mamba_rms_norm=True), OF_TII),
    "ibm-granite/granite-4.0-h-tiny": Published(GRANITE4, OF_IBM),
    "ibm-granite/granite-4.0-h-micro": Published(
        but(GRANITE4, num_experts_per_tok=0, num_local_experts=0), OF_IBM
    ),
    "ibm-granite/granite-4.0-micro": Published(
        but(
            GRANITE4, layer_types=["attention"] * 2, num_experts_per_tok=0, num_local_experts=0,
            position_embedding_type="rope",
        ),
        OF_IBM,
    ),
    "ibm-granite/granite-4.0-h-tiny, with limits of time steps": Published(
        but(GRANITE4, time_step_limit=[0.001, 0.1]),
        refused=r"the granitemoehybrid configuration has time_step_limit=\[0.001, 0.1\]; supported: 0.0, inf",
    ),
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2": Published(NEMOTRON_H),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": Published(NANO3, ("norm_eps",)),
    "LiquidAI/LFM2-1.2B": Published(
        but(CONVOLUTIONS, "intermediate_size", block_ff_dim=72, **OF_LIQUID), tuple(OF_LIQUID)
    ),
    "LiquidAI/LFM2-2.6B": Published(
        but(
            CONVOLUTIONS, "full_attn_idxs", block_auto_adjust_ff_dim=False, layer_types=["conv", "full_attention"],
            tie_embedding=True, **OF_LIQUID,
        ),
        tuple(OF_LIQUID),
    ),
    "LiquidAI/LFM2-8B-A1B": Published(
        of(
            "Lfm2MoeForCausalLM", "lfm2_moe", "hidden_act", "attention_dropout", conv_L_cache=3, conv_bias=False,
            layer_types=["conv", "full_attention"], norm_eps=1e-5, norm_topk_prob=True, num_dense_layers=1,
            num_experts=6, pad_token_id=0, rope_theta=1000000.0, routed_scaling_factor=1.0, tie_embedding=True,
            use_expert_bias=True, use_pos_enc=True, **EXPERTS,
        ),
        ("use_pos_enc",),
    ),
    "LiquidAI/LFM3-1.7B": Published(LFM3),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": Published(NEXT, ("use_sliding_window",), buffers=GUESSING),
    "Qwen/Qwen3.5-0.8B, its text part": Published(but(TEXT, tie_word_embeddings=True), ALSO, buffers=GUESSING),
    "Qwen/Qwen3.5-35B-A3B, its text part": Published(
        but(
            TEXT, "intermediate_size", architectures=["Qwen3_5MoeForCausalLM"], model_type="qwen3_5_moe_text",
            num_experts=6, router_aux_loss_coef=0.001, shared_expert_intermediate_size=40, **EXPERTS,
        ),
        ALSO, buffers=GUESSING,
    ),
    "CohereLabs/command-a-plus-05-2026": Published(
        of(
            "Cohere2MoeForCausalLM", "cohere2_moe", attention_bias=False, expert_selection_fn="sigmoid",
            first_k_dense_replace=1, head_dim=8, layer_norm_eps=1e-5, logit_scale=0.25, norm_topk_prob=True,
            num_experts=6, num_experts_per_tok=2, num_hidden_layers=3, num_shared_experts=1, pad_token_id=0,
            prefix_dense_intermediate_size=56, prefix_dense_sliding_window_pattern=1, rms_norm_eps=None,
            rope_scaling=None, rope_theta=50000, shared_expert_combination_strategy="average", sliding_window=8,
            sliding_window_pattern=2, tie_word_embeddings=True,
        )
    ),
    "LGAI-EXAONE/K-EXAONE-236B-A23B": Published(
        of(
            "ExaoneMoEForCausalLM", "exaone_moe", first_k_dense_replace=1, layer_types=KINDS, n_group=1,
            norm_topk_prob=True, num_experts=6, num_shared_experts=1, rms_norm_eps=1e-5, rope_theta=1000000,
            routed_scaling_factor=2.5, sliding_window=8, sliding_window_pattern="LG", tie_word_embeddings=False,
            topk_group=1, **EXPERTS,
        )
    ),
    "arcee-ai/Trinity-Mini": Published(
        of(
            "AfmoeForCausalLM", "afmoe", auto_map=dict(AutoModelForCausalLM="modeling_afmoe.AfmoeForCausalLM"),
            global_attn_every_n_layers=2, head_dim=16, layer_types=KINDS, mup_enabled=True, num_dense_layers=1,
            num_experts=6, num_shared_experts=1, pad_token_id=12, rms_norm_eps=1e-5, rope_scaling=None,
            rope_theta=10000, route_scale=2.826, sliding_window=8, tie_word_embeddings=False, **EXPERTS, **OF_ARCEE,
        ),
        tuple(OF_ARCEE),
    ),
    "Aleph-Alpha/Kolibri-1": Published(
        of(
            "Kolibri1ForCausalLM", "kolibri1", "intermediate_size", "torch_dtype", attention_bias=False,
            bos_token_id=None, dtype="bfloat16", head_dim=16, head_dtype="float32", layer_types=KINDS,
            norm_topk_prob=False, num_experts=6, pad_token_id=1, quantization_config=QUANTIZED["fp8"],
            rms_norm_eps=1e-6, rope_theta=10000.0, shared_expert_intermediate_size=40, sliding_window=8,
            tie_word_embeddings=False, use_sliding_window=True, **EXPERTS,
        ),
        ("attention_bias", "head_dtype", "use_sliding_window"), **IN_BLOCKS,
    ),
    "tencent/Hy3": Published(
        of(
            "HYV3ForCausalLM", "hy_v3", "attention_dropout", "torch_dtype", enable_moe_fp32_combine=False,
            first_k_dense_replace=1, head_dim=16, num_experts=6, num_nextn_predict_layers=1, num_shared_experts=1,
            output_router_logits=True, pad_token_id=4, rms_norm_eps=1e-5,
            rope_parameters=dict(rope_theta=11158840.0, rope_type="default"), router_scaling_factor=2.826,
            sep_token_id=5, tie_word_embeddings=False, transformers_version="5.6.0", **EXPERTS, **OF_TENCENT,
        ),
        tuple(OF_TENCENT), buffers=MORE_LAYERS,
    ),
    "allenai/FlexOlmo-7x7B-1T": Published(
        of(
            "FlexOlmoForCausalLM", "flex_olmo", attention_bias=False, norm_topk_prob=False, num_experts=6,
            num_experts_per_tok=3, num_key_value_heads=6, output_router_logits=False, pad_token_id=3, rms_norm_eps=1e-6,
            rope_scaling=None, rope_theta=500000, router_aux_loss_coef=0.01, tie_word_embeddings=False,
        )
    ),
    "upstage/Solar-Open-100B": Published(
        of(
            "SolarOpenForCausalLM", "solar_open", "intermediate_size", attention_bias=False, head_dim=16, n_group=1,
            n_routed_experts=6, n_shared_experts=1, norm_topk_prob=True, rms_norm_eps=1e-5, rope_theta=1000000,
            routed_scaling_factor=1.0, tie_word_embeddings=False, topk_group=1, **EXPERTS,
        )
    ),
}  # fmt: skip

# Latent attention.

DEEPSEEK_YARN = dict(beta_fast=32, beta_slow=1, factor=40, original_max_position_embeddings=16, type="yarn")
DEEPSEEK2 = EXPERTS | of(
    "DeepseekV2ForCausalLM", "deepseek_v2", attention_bias=False, aux_loss_alpha=0.001,
    auto_map=dict(AutoModelForCausalLM="modeling_deepseek.DeepseekV2ForCausalLM"), first_k_dense_replace=1,
    kv_lora_rank=20, moe_layer_freq=1, n_group=1, n_routed_experts=6, n_shared_experts=2, norm_topk_prob=False,
    num_key_value_heads=6, pretraining_tp=1, q_lora_rank=None, qk_nope_head_dim=12, qk_rope_head_dim=8,
    rms_norm_eps=1e-6, rope_scaling=DEEPSEEK_YARN | dict(mscale=0.707, mscale_all_dim=0.707), rope_theta=10000,
    routed_scaling_factor=1.0, scoring_func="softmax", seq_aux=True, tie_word_embeddings=False, topk_group=1,
    topk_method="greedy", v_head_dim=10,
)  # fmt: skip
IN_GROUPS = dict(n_routed_experts=12, num_experts_per_tok=3, q_lora_rank=28)
DEEPSEEK3 = but(
    DEEPSEEK2, "aux_loss_alpha", "seq_aux", architectures=["DeepseekV3ForCausalLM"], ep_size=1, n_group=4,
    auto_map=dict(AutoModelForCausalLM="modeling_deepseek.DeepseekV3ForCausalLM"), model_type="deepseek_v3",
    n_shared_experts=1, norm_topk_prob=True, num_nextn_predict_layers=1, quantization_config=QUANTIZED["fp8"],
    rope_scaling=DEEPSEEK_YARN | dict(mscale=1.0, mscale_all_dim=1.0), routed_scaling_factor=2.5,
    scoring_func="sigmoid", topk_group=2, topk_method="noaux_tc", **IN_GROUPS,
)  # fmt: skip
AXK1 = but(
    DEEPSEEK2, "aux_loss_alpha", "auto_map", "seq_aux", architectures=["AXK1ForCausalLM"], ep_size=1,
    model_type="AXK1", n_group=4, n_shared_experts=1, norm_topk_prob=True, num_nextn_predict_layers=0,
    rope_scaling=None, routed_scaling_factor=2.5, scoring_func="sigmoid", topk_group=2, topk_method="noaux_tc",
    **IN_GROUPS,
)  # fmt: skip
UNREAD_NORM = ("model.layers.0.post_mlp_layernorm.weight",)
SIXTH = {
    "deepseek-ai/DeepSeek-V2-Lite": Published(
        DEEPSEEK2, ("aux_loss_alpha", "moe_layer_freq", "scoring_func", "seq_aux")
    ),
    "deepseek-ai/DeepSeek-V2": Published(
        but(
            DEEPSEEK2, n_group=4, topk_group=2, routed_scaling_factor=16.0, topk_method="group_limited_greedy",
            **IN_GROUPS,
        ),
        ("aux_loss_alpha", "moe_layer_freq", "scoring_func", "seq_aux"),
    ),
    "deepseek-ai/DeepSeek-V3": Published(
        DEEPSEEK3, ("ep_size", "moe_layer_freq", "scoring_func", "topk_method"), buffers=MORE_LAYERS, **IN_BLOCKS
    ),
    "moonshotai/Kimi-K2-Instruct": Published(
        but(
            DEEPSEEK3, aux_loss_alpha=0.001, model_type="kimi_k2", n_group=1, num_nextn_predict_layers=0,
            rope_scaling=DEEPSEEK3["rope_scaling"] | dict(beta_fast=1.0, beta_slow=1.0, factor=32.0),
            rope_theta=50000.0, routed_scaling_factor=2.827, seq_aux=True, topk_group=1,
        ),
        ("aux_loss_alpha", "ep_size", "moe_layer_freq", "scoring_func", "seq_aux", "topk_method"), **IN_BLOCKS,
    ),
    "mistralai/Mistral-Small-4-119B-2603, its text part": Published(
        but(
            DEEPSEEK2, "aux_loss_alpha", "auto_map", "moe_layer_freq", "rope_scaling", "rope_theta", "scoring_func",
            "seq_aux", "topk_method", architectures=["Mistral4ForCausalLM"], first_k_dense_replace=0, head_dim=20,
            model_type="mistral4", n_shared_experts=1, norm_topk_prob=True, pad_token_id=11, q_lora_rank=28,
            qk_head_dim=20, rope_interleave=True,
            rope_parameters=dict(
                beta_fast=32.0, beta_slow=1.0, factor=128.0, llama_4_scaling_beta=0.1, max_position_embeddings=64,
                mscale=1.0, mscale_all_dim=1.0, original_max_position_embeddings=16, partial_rotary_factor=0.4,
                rope_theta=10000.0, rope_type="yarn", type="yarn",
            ),
        )
    ),
    "skt/A.X-K1": Published(AXK1, ("ep_size", "scoring_func", "topk_method"), buffers=UNREAD_NORM),
    "zai-org/GLM-4.7-Flash": Published(
        but(
            DEEPSEEK2, "aux_loss_alpha", "auto_map", "moe_layer_freq", "pretraining_tp", "scoring_func", "seq_aux",
            architectures=["Glm4MoeLiteForCausalLM"], eos_token_id=[2, 3], model_type="glm4_moe_lite",
            n_shared_experts=1, norm_topk_prob=True, num_nextn_predict_layers=1, partial_rotary_factor=1.0,
            q_lora_rank=28, rms_norm_eps=1e-5, rope_scaling=None, rope_theta=1000000, routed_scaling_factor=1.8,
            topk_method="noaux_tc",
        ),
        ("topk_method",), buffers=MORE_LAYERS,
    ),
    "openbmb/MiniCPM3-4B": Published(
        of(
            "MiniCPM3ForCausalLM", "minicpm3", attention_bias=False, dim_model_base=16, initializer_range=0.1,
            auto_map=dict(AutoModelForCausalLM="modeling_minicpm.MiniCPM3ForCausalLM"), kv_lora_rank=20,
            num_key_value_heads=6, q_lora_rank=28, qk_nope_head_dim=12, qk_rope_head_dim=8, rms_norm_eps=1e-5,
            rope_scaling=longrope(4, "longrope") | dict(original_max_position_embeddings=16), scale_depth=1.4,
            scale_emb=12,
        )
    ),
    "tencent/Youtu-LLM-2B": Published(
        of(
            "YoutuForCausalLM", "youtu", attention_bias=False, kv_lora_rank=20, num_key_value_heads=6, q_lora_rank=28,
            qk_nope_head_dim=12, qk_rope_head_dim=8, rms_norm_eps=1e-6, rope_interleave=True, rope_scaling=None,
            rope_theta=1600000, tie_word_embeddings=True, v_head_dim=10,
        )
    ),
}  # fmt: skip

ONE_FILE = FIRST | SECOND | THIRD | FOURTH | FIFTH | SIXTH
