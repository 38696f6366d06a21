"""GGUF files in 32, 16 or 8 bits, written from a checkpoint of Transformers."""

import json
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
OUTSIDE = {
    "wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm", "embed_tokens": "token_embd",
    "norm": "output_norm",
}  # fmt: skip


def write(checkpoint, path, kind, words=False):
    """Write a file of a kind of `KINDS`, with the ids as words, or without a vocabulary."""
    kind, config = KINDS[kind], json.loads(Path(checkpoint, "config.json").read_text())
    writer = gguf.GGUFWriter(path, config["model_type"], use_temp_file=False)
    describe(writer, config)
    if words:
        name_tokens(writer, config["vocab_size"])
    else:
        writer.add_tokenizer_model("no_vocab")
    with safe_open(Path(checkpoint, "model.safetensors"), framework="np") as file:
        for source in file.keys():  # noqa: SIM118  it is not a dictionary
            name, array = translated(source, file.get_tensor(source), config)
            stored = kind if array.ndim == 2 and "position" not in name else GGMLQuantizationType.F32
            data = gguf.quants.quantize(array.astype(np.float32), stored)
            writer.add_tensor(name, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        writer.add_rope_dimension_count(width // heads)
        writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])


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
    if stem in OUTSIDE:
        return f"{OUTSIDE[stem]}.{kind}", array
    _, layer, module = stem.split(".", 2)
    if config["model_type"] == "gpt2":
        stored_by_inputs = array.ndim == 2
        return f"blk.{layer}.{GPT2[module]}.{kind}", array.T if stored_by_inputs else array
    if module in ("self_attn.q_proj", "self_attn.k_proj"):  # pairs that rotate are adjacent there
        heads = config["num_attention_heads" if "q_proj" in module else "num_key_value_heads"]
        array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
    return f"blk.{layer}.{LLAMA[module]}.{kind}", array
