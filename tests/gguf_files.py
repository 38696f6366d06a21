"""Writes GGUF files of Transformers' models as llama.cpp's converter does, with the names and types of gguf."""

import itertools
import math
import re
import struct
from types import SimpleNamespace

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Types, quants
from safetensors.torch import save_file

# Others have the name of the model type.
ARCHITECTURES = dict(
    mistral="llama", ministral3="mistral3", mixtral="llama", gemma3_text="gemma3", gemma4_text="gemma4", olmo3="olmo2",
    qwen3_moe="qwen3moe", qwen3_next="qwen3next", qwen3_5_text="qwen35", qwen3_5_moe_text="qwen35moe",
    gpt_oss="gpt-oss",
)  # fmt: skip
WITH_DELTA = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
PLUS_ONE = ("gemma", "gemma2", "gemma3_text", *WITH_DELTA)
PAIRED = ("granite", "llama", "mistral", "ministral3", "mixtral", "smollm3")
# Files say how large heads are.
OF_HEADS = (
    "gemma", "gemma2", "gemma3_text", "gpt_oss", "qwen3", *WITH_DELTA, "qwen3_moe", "seed_oss",
)  # fmt: skip
OF_GRANITE = dict(
    attention_scale="attention_multiplier", embedding_scale="embedding_multiplier",
    residual_scale="residual_multiplier", logit_scale="logits_scaling",
)  # fmt: skip
# Tensors of Gemma 4's layers that the package has no names for, or not these.
OF_GEMMA4 = {
    "layer_scalar": "layer_output_scale.weight", "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale", "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
}  # fmt: skip
# The places in a block of its scale and, after it, of the scale of minima, and how large that is beside the first.
SCALES = dict(
    Q4_0=[(0, 1)], Q4_1=[(0, 1), (2, -7.5)], Q5_0=[(0, 1)], Q5_1=[(0, 1), (2, -15.5)], Q8_0=[(0, 1)],
    Q2_K=[(80, 1), (82, 1.5)], Q3_K=[(108, 1)], Q4_K=[(0, 1), (2, 7.5)], Q5_K=[(0, 1), (2, 15.5)], Q6_K=[(208, 1)],
)  # fmt: skip
PACKED = (*SCALES, "MXFP4")
IN_PYTHON = ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")  # types that the package can quantize to


def write_gguf(path, model, types="F32", change=None, split=0):
    """Write a model's file, and return the tensors that it has, under the names of a checkpoint: f32, or f16 and bf16.

    `types` is the ggml type of all matrices, or a type for each pattern of checkpoints' names; what it does not fit
    is F32. Numbers of K types are drawn. `change` may change the writer before it writes. With `split`, files have so
    many tensors each.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, ARCHITECTURES.get(config.model_type, config.model_type), split_max_tensors=split)
    describe(writer, config)
    held = {}
    generator = np.random.default_rng(0)
    for stored, names, tensor, undo in converted(model):
        kind = type_of(types, names[0], tensor)
        data, numbers = encoded(tensor, kind, generator)
        writer.add_tensor(stored, data, raw_dtype=Types[kind])
        held |= zip(names, undo(numbers), strict=True)
    if factors := llama3_factors(config) + gemma4_factors(config):
        writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))
    for name in ("long", "short") if config.model_type == "phi3" else ():
        if factors := config.rope_parameters.get(f"{name}_factor"):
            writer.add_tensor(f"rope_factors_{name}.weight", np.array(factors, np.float32))
    if change:
        change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if config.model_type == "qwen3_next":
        of_pieces(held, config.linear_num_key_heads, config.linear_key_head_dim)
    return in_turns(held)


def with_numbers(model, held, directory):
    """Return the model of Transformers with the tensors that `write_gguf` has returned. Uses a new directory."""
    model.config.save_pretrained(directory)
    tensors = {name: tensor.float().contiguous() for name, tensor in held.items()}
    save_file(tensors, directory / "model.safetensors", metadata=dict(format="pt"))
    return type(model).from_pretrained(directory, dtype=torch.float32).eval()


def describe(writer, config):
    """Write the metadata that llama.cpp's converter writes for such a model."""
    if config.model_type == "gemma4_text":
        describe_gemma4(writer, config)
        return
    rope, family = getattr(config, "rope_parameters", None) or {}, config.model_type
    rope = rope.get("full_attention", rope)
    writer.add_type("model")
    writer.add_name("a tiny model")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    if family != "qwen3_5_moe_text":
        writer.add_feed_forward_length(4 * config.n_embd if family == "gpt2" else config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    if family == "gpt2":
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        heads = config.num_key_value_heads
        if family == "lfm2":
            heads = [heads if kind == "full_attention" else 0 for kind in config.layer_types]
            writer.add_shortconv_l_cache(config.conv_L_cache)
        writer.add_head_count_kv(heads)
        writer.add_layer_norm_rms_eps(config.norm_eps if family == "lfm2" else config.rms_norm_eps)
        if family != "gemma2":
            writer.add_rope_freq_base(rope["rope_theta"])
        if family in PAIRED or family == "lfm2":
            writer.add_vocab_size(config.vocab_size)
        if family in PAIRED:
            writer.add_rope_dimension_count(head_dim)
        if family in OF_HEADS:
            writer.add_key_length(head_dim)
            writer.add_value_length(head_dim)
    if family == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if family == "phi3":
        size = config.hidden_size // config.num_attention_heads
        writer.add_rope_dimension_count(int(rope["partial_rotary_factor"] * size))
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
    if family in WITH_DELTA:
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
        writer.add_full_attention_interval(config.layer_types.index("full_attention") + 1)
        writer.add_rope_dimension_count(int(head_dim * rope["partial_rotary_factor"]))
    if family.startswith("qwen3_5"):
        writer.add_rope_dimension_sections([11, 11, 10, 0])
    if family == "qwen3_next":
        linear = [kind == "linear_attention" for kind in config.layer_types]
        writer.add_array("qwen3next.attention.recurrent_layers", linear)
    if family == "granite":
        for key, name in OF_GRANITE.items():
            getattr(writer, f"add_{key}")(getattr(config, name))
    if family in ("qwen3_5_moe_text", "qwen3_next"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if family in ("qwen3_moe", "qwen3_5_moe_text", "qwen3_next"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if family == "gpt_oss":
        writer.add_expert_feed_forward_length(config.intermediate_size)
    if family in ("mixtral", "qwen3_moe", "gpt_oss"):
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    window = getattr(config, "sliding_window", None)
    if family in ("gemma2", "gemma3_text", "phi3", "gpt_oss") or (family in ("mistral", "mixtral") and window):
        writer.add_sliding_window(window or 0)
    if family == "olmo3":
        writer.add_sliding_window(window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    describe_scaling(writer, config, rope)
    describe_tokens(writer, config)


def describe_gemma4(writer, config):
    config = SimpleNamespace(**config.to_dict())  # the model's own sizes, which layers may have otherwise
    kinds, readers, size = config.layer_types, config.num_kv_shared_layers, config.intermediate_size
    full, rope = of_full_attention(vars(config)), config.rope_parameters
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(len(kinds))
    sizes = [size] * (len(kinds) - readers) + [size * (1 + config.use_double_wide_mlp)] * readers
    writer.add_feed_forward_length(sizes if config.use_double_wide_mlp else size)
    writer.add_head_count(config.num_attention_heads)
    heads, of_full = config.num_key_value_heads, full.get("num_key_value_heads")
    of_each = [of_full if kind == "full_attention" else heads for kind in kinds]
    writer.add_head_count_kv(of_each if of_full else heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    for end, number in ("", full["head_dim"]), ("_swa", config.head_dim):
        for key in ("add_key_length", "add_value_length", "add_rope_dimension_count"):
            getattr(writer, f"{key}{end}")(number)
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])
    writer.add_shared_kv_layers(readers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input or 0)
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.enable_moe_block:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    describe_tokens(writer, config)


def of_full_attention(config):
    """The sizes of Gemma 4's layers without windows, where they differ from the others', and of their heads."""
    return dict(head_dim=config["head_dim"]) | next(iter(config["per_layer_config"].values()))


def describe_scaling(writer, config, rope):
    kind = rope.get("rope_type")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "attention_factor" in rope:
            writer.add_rope_scaling_yarn_attn_factor(rope["attention_factor"])
        if "beta_fast" in rope:
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
            writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    if config.model_type == "ministral3":
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if kind == "longrope":
        length = config.original_max_position_embeddings
        ratio = config.max_position_embeddings / length
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(ratio) / math.log(length)) if ratio > 1 else 1.0)


def describe_tokens(writer, config):
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"<{number}>" for number in range(config.vocab_size)])
    writer.add_token_types([1] * config.vocab_size)
    writer.add_token_scores([-float(number) for number in range(config.vocab_size)])
    writer.add_token_merges(["< 1", "<1 >"])
    if config.bos_token_id is not None:
        writer.add_bos_token_id(config.bos_token_id)
    if config.eos_token_id is not None:
        writer.add_eos_token_id(config.eos_token_id)
    if config.pad_token_id is not None:
        writer.add_pad_token_id(config.pad_token_id)


def converted(model):
    """Yield each tensor of the file: its name there, its names in a checkpoint, itself, and what undoes the conversion.

    What undoes it returns a tensor for each of the names.
    """
    config = model.config
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    kind = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    for name, tensor in model.state_dict().items():
        if name in tied or name.endswith((".attn.bias", ".attn.masked_bias")):
            continue
        tensor = tensor.detach().float()
        if ".mlp.experts." in name and config.model_type == "gpt_oss":
            yield from of_gpt_oss(name, tensor)
            continue
        if config.model_type == "qwen3_next" and name.endswith("in_proj_qkvz.weight") and ".layers.0." not in name:
            yield from of_qwen3_next(config, name, tensor)
            continue
        if name.endswith("self_attn.sinks"):
            yield f"blk.{name.split('.')[2]}.attn_sinks.weight", [name], tensor, lambda numbers: [numbers]
            continue
        if config.model_type == "gemma4_text" and (part := OF_GEMMA4.get(name.split(".", 3)[-1])):
            matrices = [f"{name} {number}" for number in range(len(tensor))] if ".experts." in name else None
            yield (
                f"blk.{name.split('.')[2]}.{part}",
                matrices or [name],
                tensor,
                list if matrices else lambda own: [own],
            )
            continue
        if ".mlp.experts." in name:
            yield from stacked(config.model_type, names, name, tensor)
            continue
        named = name.replace(".dt_bias", ".dt_proj.bias")
        stored = names.get_name(named, try_suffixes=(".weight", ".bias"))
        yield stored, *one(config, name, tensor)


def stacked(family, names, name, tensor):
    """Yield the tensors of experts, as `converted` does: in the model, gates and ups are one, [experts, 2 inner, h]."""
    block = f"{name.split('.mlp.')[0]}.{'block_sparse_moe' if family == 'mixtral' else 'mlp'}.experts"
    parts = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    gates = name.endswith("gate_up_proj")
    for end, part in zip(parts[:2] if gates else parts[2:], tensor.chunk(1 + gates, 1), strict=True):
        merged = names.get_name(f"{block}.{end}")
        each = [f"{block}.{n}.{end}.weight" for n in range(len(tensor))]
        yield f"{merged}.weight", each, part.contiguous(), list


def of_gpt_oss(name, tensor):
    """Yield the tensors of gpt-oss's experts, as `converted` does. In the checkpoint, a gate and what it is for take
    turns as features, and matrices are [in, out].
    """
    end, bias = ("weight", False) if tensor.ndim == 3 else ("bias", True)
    tensor = tensor if bias else tensor.mT
    gates = ".gate_up_proj" in name
    parts = dict(gate=tensor[:, ::2], up=tensor[:, 1::2]) if gates else dict(down=tensor)
    for part, own in parts.items():
        stored = f"blk.{name.split('.')[2]}.ffn_{part}_exps.{end}"
        yield stored, [f"{name} {part}"], own.contiguous(), lambda numbers: [numbers]


def of_qwen3_next(config, name, tensor):
    """Yield two tensors of a delta net, as `converted` does. Layer 0 has the checkpoint's one, as in older files."""
    heads, key = config.linear_num_key_heads, config.linear_key_head_dim
    values = config.linear_value_head_dim * config.linear_num_value_heads // heads
    pieces = tensor.unflatten(0, (heads, -1)).split([key, key, values, values], 1)
    *qkv, z = (piece.flatten(0, 1) for piece in pieces)
    for part, stored in (("attn_qkv", torch.cat(qkv)), ("attn_gate", z)):
        yield f"blk.{name.split('.')[2]}.{part}.weight", [f"{name} {part}"], stored, lambda numbers: [numbers]


def of_pieces(held, keys, key):
    """Join the two tensors again in a checkpoint's one."""
    for name in [name.removesuffix(" attn_gate") for name in held if name.endswith(" attn_gate")]:
        qkv, z = held.pop(f"{name} attn_qkv"), held.pop(f"{name} attn_gate")
        parts = *qkv.split([keys * key, keys * key, len(qkv) - 2 * keys * key]), z
        held[name] = torch.cat([part.unflatten(0, (keys, -1)) for part in parts], 1).flatten(0, 1)
    return held


def in_turns(held):
    """Join the halves of gpt-oss's experts again, in a checkpoint's tensors."""
    for name in [name.removesuffix(" down") for name in held if name.endswith(" down")]:
        down = held.pop(f"{name} down")
        held[name] = down if down.ndim == 2 else down.mT
    for name in [name.removesuffix(" gate") for name in held if name.endswith(" gate")]:
        gate, up = held.pop(f"{name} gate"), held.pop(f"{name} up")
        both = torch.stack([gate, up], 2).flatten(1, 2)
        held[name] = both if both.ndim == 2 else both.mT
    for name in [name for name in held if name.endswith("_proj 0")]:  # Gemma 4's experts
        name = name.removesuffix(" 0")
        numbers = (f"{name} {number}" for number in itertools.count())
        held[name] = torch.stack([held.pop(each) for each in itertools.takewhile(held.__contains__, numbers)])
    return held


def one(config, name, tensor):
    if config.model_type in PAIRED and re.search(r"\.[qk]_proj\.", name):
        heads = config.num_attention_heads if ".q_proj" in name else config.num_key_value_heads
        rows = torch.arange(len(tensor)).reshape(heads, 2, -1).swapaxes(1, 2).flatten()
        back = torch.empty_like(rows)
        back[rows] = torch.arange(len(rows))
        return [name], tensor[rows], lambda numbers: [numbers[back]]
    if config.model_type in WITH_DELTA and ".linear_attn." in name:
        return [name], *of_delta(config, name.split(".linear_attn.")[1], tensor)
    if config.model_type == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        return [name], tensor.T.contiguous(), lambda numbers: [numbers.T]
    if config.model_type in PLUS_ONE and name.endswith("norm.weight"):
        return [name], tensor + 1, lambda numbers: [numbers - 1]
    if name.endswith("layers.1.mlp.shared_expert_gate.weight"):  # older converters drop axes of one
        return [name], tensor.squeeze(0), lambda numbers: [numbers.unsqueeze(0)]
    if name.endswith(".conv.conv.weight"):
        return [name], tensor.squeeze(1), lambda numbers: [numbers.unsqueeze(1)]
    if config.model_type == "mixtral":
        name = name.replace(".mlp.gate.", ".block_sparse_moe.gate.")
    return [name], tensor, lambda numbers: [numbers]


def of_delta(config, part, tensor):
    """Return a tensor of a delta net as the file has it, and what undoes the conversion.

    Heads of values are [heads of keys, turns] in the checkpoint, and in the file the first of each head of keys come
    first, but for Qwen3-Next.
    """
    if part == "norm.weight":
        return tensor, lambda numbers: [numbers]
    keys, heads, size = config.linear_num_key_heads, config.linear_num_value_heads, config.linear_value_head_dim
    first = 2 * keys * config.linear_key_head_dim if part.startswith(("in_proj_qkv", "conv1d")) else 0
    width = size if part.startswith(("in_proj_qkv", "in_proj_z", "conv1d", "out_proj")) else 1
    order = torch.arange(heads * width).reshape(keys, heads // keys, width).swapaxes(0, 1).flatten()
    order = torch.cat([torch.arange(first), first + order])
    if config.model_type == "qwen3_next":
        order = torch.arange(tensor.shape[part == "out_proj.weight"])
    back = torch.argsort(order)
    if part == "out_proj.weight":
        return tensor[:, order].contiguous(), lambda numbers: [numbers[:, back]]
    if part == "A_log":
        return -tensor[order].exp(), lambda numbers: [(-numbers).log()[back]]
    if part == "conv1d.weight":
        return tensor.squeeze(1)[order], lambda numbers: [numbers[back].unsqueeze(1)]
    return tensor[order], lambda numbers: [numbers[back]]


def type_of(types, name, tensor):
    """Return the type of a tensor. Of vectors, biases, routers and positions it is F32, as llama.cpp has it."""
    if isinstance(types, str):
        types = {r"^(?!.*(wpe|\.gate\.)).*weight": types}
    kind = next((kind for pattern, kind in types.items() if re.search(pattern, name)), "F32")
    fits = tensor.ndim > 1 and "bias" not in name and tensor.shape[-1] % gguf.GGML_QUANT_SIZES[Types[kind]][0] == 0
    return kind if fits else "F32"


def encoded(tensor, kind, generator):
    """Return a tensor's data in a type, and the tensor that they are."""
    if kind == "F32":
        return tensor.numpy(), tensor
    if kind in IN_PYTHON:
        data = quants.quantize(tensor.numpy(), Types[kind])
        numbers = torch.from_numpy(quants.dequantize(data, Types[kind]).copy())
        return data, numbers.to(dict(F16=torch.float16, BF16=torch.bfloat16).get(kind, torch.float32))
    data = drawn(kind, tensor.shape, generator, deviation=float(tensor.std()))
    return data, torch.from_numpy(quants.dequantize(data, Types[kind]))


def drawn(kind, shape, generator, deviation=0.3):
    """Return random blocks of a type, u8[…, bytes of a row]: all bits are drawn, and scales are finite."""
    numbers, size = gguf.GGML_QUANT_SIZES[Types[kind]]
    if kind == "MXFP4":  # an exponent, and codes
        blocks = generator.integers(0, 256, (*shape[:-1], shape[-1] // numbers, size), dtype=np.uint8)
        blocks[..., 0] = generator.integers(120, 124, blocks.shape[:-1])
        return blocks.reshape(*shape[:-1], -1)
    blocks = generator.integers(0, 256, (*shape[:-1], shape[-1] // numbers, size), dtype=np.uint8)

    def scaled(by):
        for at, factor in SCALES[kind]:
            scales = (draws * factor * by).astype(np.float16)
            blocks[..., at : at + 2] = scales[..., None].view(np.uint8)
        return blocks.reshape(*shape[:-1], -1)

    draws = generator.uniform(0.5, 1.5, blocks.shape[:-1])
    whole = quants.dequantize(scaled(0.01), Types[kind])
    return scaled(0.01 * deviation / whole.std())


def llama3_factors(config):
    """The factors that llama.cpp's converter writes for LLaMA 3.1 and later; none for other models."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "llama3":
        return []
    dim = config.head_dim
    frequencies = 1.0 / (rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    factors = []
    for length in 2 * math.pi / frequencies:
        turns = rope["original_max_position_embeddings"] / length
        smooth = (turns - low) / (high - low)
        between = 1 / ((1 - smooth) / rope["factor"] + smooth)
        factors.append(float(1 if turns > high else rope["factor"] if turns < low else between))
    return factors


def gemma4_factors(config):
    """The factors that llama.cpp's converter writes for Gemma 4's layers without windows; none for other models."""
    if config.model_type != "gemma4_text":
        return []
    full = of_full_attention(config.to_dict())["head_dim"]
    rotating = int(full * config.rope_parameters["full_attention"]["partial_rotary_factor"] / 2)
    return [1.0] * rotating + [1e30] * (full // 2 - rotating)


# Files written by hand, right or wrong.

TEXT, LIST = 8, 9


def text(value):
    value = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(value)) + value


def raw(values=(), tensors=(), data=b"", magic=b"GGUF", version=3, counts=None, alignment=32):
    """Return a file's bytes: values are (key, number of the type, bytes), tensors (name, dims, type, offset)."""
    head = magic + struct.pack("<I", version) + struct.pack("<QQ", *(counts or (len(tensors), len(values))))
    for key, kind, value in values:
        head += text(key) + struct.pack("<I", kind) + value
    for name, dims, kind, offset in tensors:
        head += text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
    return head + bytes(-len(head) % alignment) + data
