"""GGUF files in 32, 16 or 8 bits, written from a checkpoint of Transformers."""

import json
import re
from pathlib import Path

import gguf
import ml_dtypes  # noqa: F401  it adds bfloat16 to NumPy
import numpy as np
from gguf import GGMLQuantizationType, TokenType
from safetensors import safe_open

KINDS = {name: GGMLQuantizationType[name.upper()] for name in ("f32", "bf16", "f16", "q8_0")}
GPT2 = {
    "ln_1": "attn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output", "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
}  # fmt: skip
LLAMA = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
QWEN3_MOE = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate": "ffn_gate_inp"}
QWEN3_MOE |= {f"mlp.experts.{part}_proj": f"ffn_{part}_exps" for part in ("gate", "up", "down")}
LFM2 = {
    "operator_norm": "attn_norm", "conv.conv": "shortconv.conv", "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj", "self_attn.out_proj": "attn_output", "ffn_norm": "ffn_norm",
    "self_attn.q_layernorm": "attn_q_norm", "self_attn.k_layernorm": "attn_k_norm", "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down", "feed_forward.w3": "ffn_up",
}  # fmt: skip
MODULES = dict(gpt2=GPT2, llama=LLAMA, qwen3_moe=LLAMA | QWEN3_MOE, lfm2=LLAMA | LFM2)
EXPERT = re.compile(r"(?<=\.experts)\.(\d+)(?=\.)")
OUTSIDE = {
    "wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm", "embed_tokens": "token_embd",
    "norm": "output_norm", "embedding_norm": "token_embd_norm",
}  # fmt: skip


def write(checkpoint, path, kind, words=False):
    """Write a file of a kind of `KINDS`, with the ids as words, or without a vocabulary."""
    kind, config = KINDS[kind], json.loads(Path(checkpoint, "config.json").read_text())
    writer = gguf.GGUFWriter(path, config["model_type"].replace("_", ""), use_temp_file=False)
    describe(writer, config)
    if words:
        name_tokens(writer, config["vocab_size"])
    else:
        writer.add_tokenizer_model("no_vocab")
    with safe_open(Path(checkpoint, "model.safetensors"), framework="np") as file:
        for source, array in stacked(file):
            name, array = translated(source, array, config)
            plain = array.ndim == 1 or any(part in name for part in ("position", "_inp", "shortconv.conv"))
            stored = GGMLQuantizationType.F32 if plain else kind
            data = gguf.quants.quantize(array.astype(np.float32), stored)
            writer.add_tensor(name, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def stacked(file):
    """Yield the tensors of a file by name, with those of all experts as one."""
    experts = {}
    for source in file.keys():  # noqa: SIM118  it is not a dictionary
        if expert := EXPERT.search(source):
            experts.setdefault(EXPERT.sub("", source), {})[int(expert[1])] = source
        else:
            yield source, file.get_tensor(source)
    for name, sources in experts.items():
        yield name, np.stack([file.get_tensor(sources[number]) for number in sorted(sources)])


def describe(writer, config):
    """Write the sizes."""
    gpt2 = config["model_type"] == "gpt2"
    read = (lambda theirs, ours: config[theirs]) if gpt2 else (lambda theirs, ours: config[ours])
    heads, width = read("n_head", "num_attention_heads"), read("n_embd", "hidden_size")
    writer.add_context_length(read("n_positions", "max_position_embeddings"))
    writer.add_embedding_length(width)
    writer.add_block_count(read("n_layer", "num_hidden_layers"))
    writer.add_feed_forward_length(4 * width if gpt2 else config["intermediate_size"])
    writer.add_head_count(heads)
    if gpt2:
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    else:
        describe_rotated(writer, config, width // heads)
    writer.add_vocab_size(config["vocab_size"])


def describe_rotated(writer, config, size):
    """Write the sizes of a model with rotary positions. Of a hybrid, layers without attention have no keys."""
    kinds, keys = config.get("layer_types"), config["num_key_value_heads"]
    hybrid = config["model_type"] == "lfm2"
    writer.add_head_count_kv([keys * (kind == "full_attention") for kind in kinds] if hybrid else keys)
    writer.add_layer_norm_rms_eps(config["norm_eps" if hybrid else "rms_norm_eps"])
    writer.add_rope_dimension_count(config.get("head_dim") or size)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    if hybrid:
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    if config["model_type"] == "qwen3_moe":
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def name_tokens(writer, count):
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"\N{LOWER ONE EIGHTH BLOCK}{number}" for number in range(count)])
    writer.add_token_scores([0.0] * count)
    writer.add_token_types([TokenType.NORMAL] * count)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def translated(source, array, config):
    """Return the tensor's name in GGUF, and the tensor as llama.cpp needs it."""
    stem, _, kind = source.removeprefix("transformer.").removeprefix("model.").rpartition(".")
    if stem in OUTSIDE or stem == "lm_head":
        return f"{OUTSIDE.get(stem, 'output')}.{kind}", array
    _, layer, module = stem.split(".", 2)
    family = config["model_type"]
    name = f"blk.{layer}.{MODULES[family][module]}.{kind}"
    if family == "gpt2":
        return name, array.T if array.ndim == 2 else array  # matrices are [in, out] there
    if module == "conv.conv":
        return name, array[:, 0]
    if family == "llama" and module in ("self_attn.q_proj", "self_attn.k_proj"):  # pairs that rotate are adjacent there
        heads = config["num_attention_heads" if "q_proj" in module else "num_key_value_heads"]
        array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
    return name, array
