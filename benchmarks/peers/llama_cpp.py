"""llama.cpp through llama-cpp-python. GGUF is written here in bf16 or f32, and quantized by llama.cpp."""

import json
from pathlib import Path

import gguf
import llama_cpp
import ml_dtypes  # noqa: F401  it adds bfloat16 to NumPy
import numpy as np
from gguf import GGMLQuantizationType
from safetensors import safe_open

from peers.common import Clock, run

PLAIN = {"f32": GGMLQuantizationType.F32, "bf16": GGMLQuantizationType.BF16, "f16": GGMLQuantizationType.F16}
QUANTIZED = {"q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, "q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0}
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


def prepare(task):
    path = Path(task.directory, "model.gguf")
    if task.format in PLAIN:
        write(task.checkpoint, path, PLAIN[task.format])
        return
    whole = path.with_name("whole.gguf")
    write(task.checkpoint, whole, PLAIN["bf16"])
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype, options.nthread = QUANTIZED[task.format], task.threads
    failed = llama_cpp.llama_model_quantize(str(whole).encode(), str(path).encode(), options)
    whole.unlink()
    if failed:
        raise RuntimeError(f"llama_model_quantize returned {failed}")


def write(checkpoint, path, kind):
    config = json.loads(Path(checkpoint, "config.json").read_text())
    writer = gguf.GGUFWriter(path, config["model_type"], use_temp_file=False)
    describe(writer, config)
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
    """Write the sizes, and that there is no vocabulary."""
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
    writer.add_tokenizer_model("no_vocab")


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


def load(task):
    llama_cpp.llama_log_set(silent, None)
    llama_cpp.llama_backend_init()
    return Engine(task)


@llama_cpp.llama_log_callback
def silent(level, text, data):
    """Drop the log, which is long."""


class Engine:
    def __init__(self, task):
        path = Path(task.directory, "model.gguf")
        self.weights = path.stat().st_size
        options = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), options)
        options = llama_cpp.llama_context_default_params()
        options.n_ctx, options.n_seq_max = task.rows * task.positions[-1], task.rows
        options.n_batch = task.rows * task.positions[-1]
        options.n_threads = options.n_threads_batch = task.threads
        self.context = llama_cpp.llama_init_from_model(self.model, options)
        self.batch = llama_cpp.llama_batch_init(options.n_batch, 0, 1)
        self.vocab = task.vocab

    def generate(self, ids, count):
        clock = Clock()
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), False)
        tokens = [[] for _ in ids]
        while len(tokens[0]) < count:
            start = len(ids[0]) + len(tokens[0]) - 1 if tokens[0] else 0
            for row, chosen in enumerate(self.step([row[-1:] for row in tokens] if start else ids, start)):
                tokens[row].append(chosen)
            clock.token()
        return tokens, *clock.seconds()

    def step(self, ids, start):
        """Return the most likely token after each row of ids, the first of which is at the position `start`."""
        batch, place, last = self.batch, 0, []
        for row, row_ids in enumerate(ids):
            for offset, token in enumerate(row_ids):
                batch.token[place], batch.pos[place] = token, start + offset
                batch.n_seq_id[place], batch.seq_id[place][0] = 1, row
                batch.logits[place] = offset == len(row_ids) - 1
                place += 1
            last.append(place - 1)
        batch.n_tokens = place
        if failed := llama_cpp.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode returned {failed}")
        logits = (llama_cpp.llama_get_logits_ith(self.context, place) for place in last)
        return [int(np.ctypeslib.as_array(values, (self.vocab,)).argmax()) for values in logits]


run(prepare, load)
