"""Names of tensors in GGUF files, and which of these tensors llama.cpp's converter has changed."""

from __future__ import annotations

import re
from collections.abc import Mapping

# The layer's number, a name, an expert's number, and what it is.
NAME = re.compile(
    r"(?:blk\.(0|[1-9][0-9]{0,5})\.)?([a-z_0-9]+|shortconv\.[a-z_]+)(?:\.([0-9]{1,5}))?(?:\.(weight|bias|scale))?"
)

# Names in the file and in the checkpoint, by model type. Those in "blk" are of a layer, which `LAYERS` begins. "*" and
# "{}" stand for the number of an expert; the experts of "_exps" are stacked in one tensor. A name with its end is for a
# whole name in the checkpoint, and one with a dot at its end is for a name without an end. "|" is between the names of
# parts of a tensor.
_LLAMA = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.attn_norm": "input_layernorm",
    "blk.attn_q": "self_attn.q_proj",
    "blk.attn_k": "self_attn.k_proj",
    "blk.attn_v": "self_attn.v_proj",
    "blk.attn_output": "self_attn.o_proj",
    "blk.ffn_norm": "post_attention_layernorm",
    "blk.ffn_gate": "mlp.gate_proj",
    "blk.ffn_up": "mlp.up_proj",
    "blk.ffn_down": "mlp.down_proj",
}
_EXPERTS = dict(ffn_gate="w1", ffn_down="w2", ffn_up="w3")
_MIXTRAL = {
    f"blk.{part}{end}": f"block_sparse_moe.experts.{{}}.{n}" for part, n in _EXPERTS.items() for end in ("_exps", ".*")
}
_QWEN3_MOE = {f"blk.ffn_{part}_exps": f"mlp.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")}
_QWEN3_MOE |= {"blk.ffn_gate_inp": "mlp.gate"}
_NORM_AFTER_ATTENTION = {"blk.post_attention_norm": "post_attention_layernorm"}
_GPT_OSS = _NORM_AFTER_ATTENTION | {
    "blk.attn_sinks.weight": "self_attn.sinks",
    "blk.ffn_gate_inp": "mlp.router",
    "blk.ffn_gate_exps.weight": "mlp.experts.{}.gate_up_proj",
    "blk.ffn_up_exps.weight": "mlp.experts.{}.gate_up_proj",
    "blk.ffn_down_exps.weight": "mlp.experts.{}.down_proj",
    "blk.ffn_gate_exps.bias": "mlp.experts.gate_up_proj_bias",
    "blk.ffn_up_exps.bias": "mlp.experts.gate_up_proj_bias",
    "blk.ffn_down_exps.bias": "mlp.experts.down_proj_bias",
}
_LFM2 = {
    "token_embd": "model.embed_tokens",
    "token_embd_norm": "model.embedding_norm",
    "output": "lm_head",
    "blk.attn_norm": "operator_norm",
    "blk.attn_q": "self_attn.q_proj",
    "blk.attn_k": "self_attn.k_proj",
    "blk.attn_v": "self_attn.v_proj",
    "blk.attn_output": "self_attn.out_proj",
    "blk.attn_q_norm": "self_attn.q_layernorm",
    "blk.attn_k_norm": "self_attn.k_layernorm",
    "blk.shortconv.in_proj": "conv.in_proj",
    "blk.shortconv.conv": "conv.conv",
    "blk.shortconv.out_proj": "conv.out_proj",
    "blk.ffn_norm": "ffn_norm",
    "blk.ffn_gate": "feed_forward.w1",
    "blk.ffn_up": "feed_forward.w3",
    "blk.ffn_down": "feed_forward.w2",
}
_DELTA = {
    "blk.attn_qkv": "linear_attn.in_proj_qkv",
    "blk.attn_gate": "linear_attn.in_proj_z",
    "blk.ssm_beta": "linear_attn.in_proj_b",
    "blk.ssm_alpha": "linear_attn.in_proj_a",
    "blk.ssm_ba": "linear_attn.in_proj_b|linear_attn.in_proj_a",
    "blk.ssm_in": "linear_attn.in_proj_qkv|linear_attn.in_proj_z",
    "blk.ssm_conv1d": "linear_attn.conv1d",
    "blk.ssm_a.": "linear_attn.A_log",
    "blk.ssm_dt.bias": "linear_attn.dt_bias",
    "blk.ssm_norm": "linear_attn.norm",
    "blk.ssm_out": "linear_attn.out_proj",
}
_NORMS_OF_HEADS = {"blk.attn_q_norm": "self_attn.q_norm", "blk.attn_k_norm": "self_attn.k_norm"}
_SANDWICH = _NORM_AFTER_ATTENTION | {
    "blk.ffn_norm": "pre_feedforward_layernorm",
    "blk.post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA4 = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    "blk.inp_gate": "per_layer_input_gate",
    "blk.proj": "per_layer_projection",
    "blk.post_norm": "post_per_layer_input_norm",
    "blk.layer_output_scale.weight": "layer_scalar",
    "blk.pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "blk.post_ffw_norm_1": "post_feedforward_layernorm_1",
    "blk.post_ffw_norm_2": "post_feedforward_layernorm_2",
    "blk.ffn_gate_inp.weight": "router.proj.weight",
    "blk.ffn_gate_inp.scale": "router.scale",
    "blk.ffn_gate_up_exps.weight": "experts.{}.gate_up_proj",
    "blk.ffn_down_exps.weight": "experts.{}.down_proj",
    "blk.ffn_down_exps.scale": "router.per_expert_scale",
}
_OLMO2 = {name: own for name, own in _LLAMA.items() if name not in ("blk.attn_norm", "blk.ffn_norm")}
_OLMO2 |= _NORM_AFTER_ATTENTION | {"blk.post_ffw_norm": "post_feedforward_layernorm"}
_QWEN3_5 = _LLAMA | _NORM_AFTER_ATTENTION | _NORMS_OF_HEADS | _DELTA
_SHARED_EXPERT = {f"blk.ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")}
_SHARED_EXPERT |= {"blk.ffn_gate_inp_shexp": "mlp.shared_expert_gate"}
NAMES: Mapping[str, Mapping[str, str]] = dict(
    llama=_LLAMA,
    mistral=_LLAMA,
    ministral3=_LLAMA,
    mixtral=_LLAMA | _MIXTRAL | {"blk.ffn_gate_inp": "block_sparse_moe.gate"},
    qwen2=_LLAMA,
    qwen3=_LLAMA | _NORMS_OF_HEADS,
    qwen3_moe=_LLAMA | _NORMS_OF_HEADS | _QWEN3_MOE,
    smollm3=_LLAMA,
    lfm2=_LFM2,
    olmo2=_OLMO2 | _NORMS_OF_HEADS,
    olmo3=_OLMO2 | _NORMS_OF_HEADS,
    seed_oss=_LLAMA | _NORM_AFTER_ATTENTION,
    qwen3_5_text=_QWEN3_5,
    qwen3_5_moe_text=_QWEN3_5 | _QWEN3_MOE | _SHARED_EXPERT,
    granite=_LLAMA,
    gemma=_LLAMA,
    gemma2=_LLAMA | _SANDWICH,
    gemma3_text=_LLAMA | _SANDWICH | _NORMS_OF_HEADS,
    gemma4_text=_LLAMA | _SANDWICH | _NORMS_OF_HEADS | _GEMMA4,
    phi3=_LLAMA | {"blk.attn_qkv": "self_attn.qkv_proj", "blk.ffn_up": "mlp.gate_up_proj"},
    gpt_oss={name: own for name, own in _LLAMA.items() if ".ffn_" not in name} | _GPT_OSS,
    gpt2={
        "token_embd": "transformer.wte",
        "position_embd": "transformer.wpe",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
        "blk.attn_norm": "ln_1",
        "blk.attn_qkv": "attn.c_attn",
        "blk.attn_output": "attn.c_proj",
        "blk.ffn_norm": "ln_2",
        "blk.ffn_up": "mlp.c_fc",
        "blk.ffn_down": "mlp.c_proj",
    },
)
LAYERS = dict(gpt2="transformer.h.{}.")
# Features of queries and keys that rotate together follow each other.
PAIRED = ("granite", "llama", "mistral", "ministral3", "mixtral", "smollm3")
# Norms multiply by one plus their weight, and the converter adds the one, but for the norm of delta nets.
PLUS_ONE = ("gemma", "gemma2", "gemma3_text", "qwen3_5_text", "qwen3_5_moe_text")
# Matrices that are [in, out] in the checkpoint, and of gpt-oss tensors that are one there, with features in turns.
TURNED = dict(
    gpt2=re.compile(r"blk\..*\.(attn_qkv|attn_output|ffn_up|ffn_down)\.weight"),
    gpt_oss=re.compile(r"blk\..*\.ffn_(gate|up|down)_exps\.weight"),
)
IN_TURNS = dict(gpt_oss=re.compile(r"blk\..*\.ffn_(gate|up)_exps\.(weight|bias)"))
KERNELS = (".shortconv.conv.weight", ".ssm_conv1d.weight")  # [channels, taps]; in the checkpoint [channels, 1, taps]
ROWS = ".ffn_gate_inp_shexp.weight"  # [1, in] in the checkpoint, and older converters write [in]
RATES = ".ssm_a"  # minus what the checkpoint has the logarithm of
# Delta nets, and their tensors with a number for each head of values, or each feature of these heads. Some have those
# of queries and keys before.
OF_DELTA = ("qwen3_5_text", "qwen3_5_moe_text")
OF_HEADS = ("ssm_a", "ssm_dt", "ssm_alpha", "ssm_beta")
OF_FEATURES = ("attn_qkv", "attn_gate", "ssm_conv1d", "ssm_out")
AFTER_KEYS = ("attn_qkv", "ssm_conv1d")
# Which of the pieces of each head of keys a part of Qwen3-Next's tensors has: b and a, or query, key, values and gates.
PIECES = dict(in_proj_b=[0], in_proj_a=[1], in_proj_qkv=[0, 1, 2], in_proj_z=[3])
