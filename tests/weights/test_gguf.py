"""GGUF files: blocks, names, configurations and damage, against the package gguf and Transformers."""

import itertools
import json
import random
import re
import struct
from collections import Counter
from dataclasses import replace
from functools import cache

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Types, quants
from gguf_files import (
    IN_PYTHON,
    LIST,
    PACKED,
    SCALES,
    TEXT,
    drawn,
    llama3_factors,
    raw,
    text,
    with_numbers,
    write_gguf,
)
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GemmaConfig,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    Lfm2Config,
    LlamaConfig,
    Ministral3Config,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SeedOssConfig,
    SmolLM3Config,
)
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

from transformers_neuronx.config import completed
from transformers_neuronx.config.gguf import STORED
from transformers_neuronx.errors import CheckpointError
from transformers_neuronx.huggingface.auto import family_of
from transformers_neuronx.runtimes.absent import absent_runtime
from transformers_neuronx.weights.checkpoint import Checkpoint
from transformers_neuronx.weights.gguf import attributes_of, open_gguf
from transformers_neuronx.weights.gguf_blocks import packed
from transformers_neuronx.weights.gguf_file import KINDS, UNREAD_KINDS, Elements, StoredTensor, open_files
from transformers_neuronx.weights.packed import LEAST
from transformers_neuronx.weights.reading import expand

SIZES = dict(
    vocab_size=40,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=3,
)
LLAMA3 = dict(
    rope_type="llama3", rope_theta=5e5, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
)
FACTORS = [1.0 + 0.5 * i for i in range(8)]
LONGROPE = dict(
    original_max_position_embeddings=16,
    rope_parameters=dict(rope_type="longrope", rope_theta=1e4, long_factor=FACTORS, short_factor=FACTORS[::-1]),
)
PARTIAL = dict(rope_theta=1e4, rope_type="default", partial_rotary_factor=0.5)
YARN = dict(rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=16)
OF_GPT_OSS = YARN | dict(rope_theta=150000.0, beta_fast=32.0, beta_slow=1.0, truncate=False)
OF_MINISTRAL = YARN | dict(beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1)

GEMMA3 = dict(
    full_attention=dict(rope_type="default", rope_theta=1e6),
    sliding_attention=dict(rope_type="default", rope_theta=1e4),
)
GEMMA3_SCALED = GEMMA3 | dict(full_attention=dict(rope_type="linear", rope_theta=1e6, factor=8.0))
OF_MOE = dict(num_experts=3, num_experts_per_tok=2, moe_intermediate_size=48, norm_topk_prob=True)
OF_SHARED = dict(num_experts=3, num_experts_per_tok=2, moe_intermediate_size=48, shared_expert_intermediate_size=32)


def gpt2(**changes):
    sizes = dict(vocab_size=40, n_positions=64, n_embd=64, n_layer=2, n_head=4, n_inner=256)
    return GPT2Config(**sizes | dict(bos_token_id=1, eos_token_id=2, pad_token_id=3) | changes)


def gemma2(**changes):
    own = dict(head_dim=24, query_pre_attn_scalar=24, sliding_window=5, attn_logit_softcapping=3.0)
    return Gemma2Config(**SIZES | own | dict(final_logit_softcapping=5.0) | changes)


def gemma3(**changes):
    own = dict(head_dim=24, query_pre_attn_scalar=24, sliding_window=5, num_hidden_layers=7, rope_parameters=GEMMA3)
    return Gemma3TextConfig(**SIZES | own | changes)


def gemma4(**changes):
    kinds = ["sliding_attention", "full_attention"] * 2
    own = dict(num_hidden_layers=4, layer_types=kinds, head_dim=16, global_head_dim=32, sliding_window=5)
    own |= dict(num_global_key_value_heads=1, attention_k_eq_v=True, hidden_size_per_layer_input=0)
    return Gemma4TextConfig(**SIZES | own | changes)


def granite(**changes):
    own = dict(embedding_multiplier=3.0, residual_multiplier=0.5, attention_multiplier=0.2, logits_scaling=4.0)
    return GraniteConfig(**SIZES | own | changes)


def lfm2(**changes):
    own = dict(num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"], block_auto_adjust_ff_dim=False)
    return Lfm2Config(**SIZES | own | changes)


def qwen35(kind=Qwen3_5TextConfig, **changes):
    heads = dict(linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=8, linear_value_head_dim=32)
    rope = dict(rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25)
    own = dict(num_hidden_layers=4, head_dim=24, rope_parameters=rope, **heads)
    sizes = {name: size for name, size in SIZES.items() if name != "intermediate_size" or kind is Qwen3_5TextConfig}
    return kind(**sizes | own | changes)


def sized(kind, **changes):
    return kind(**SIZES | changes)


# Configurations of models, each with an own way to be written.
MODELS = {
    "llama": lambda: sized(LlamaConfig, rms_norm_eps=1e-5),
    "llama, tied": lambda: sized(LlamaConfig, tie_word_embeddings=True),
    "llama, biases": lambda: sized(LlamaConfig, attention_bias=True, mlp_bias=True),
    "llama, heads of their own size": lambda: sized(LlamaConfig, head_dim=24),
    "llama, heads that all have keys": lambda: sized(LlamaConfig, num_key_value_heads=4),
    "llama, linear": lambda: sized(LlamaConfig, rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=2.5)),
    "llama 3.1": lambda: sized(LlamaConfig, head_dim=32, rope_parameters=LLAMA3 | dict(factor=8.0)),
    "llama 3.2": lambda: sized(LlamaConfig, head_dim=32, rope_parameters=LLAMA3 | dict(factor=32.0)),
    "mistral": lambda: sized(MistralConfig, sliding_window=5),
    "ministral3": lambda: sized(Ministral3Config, head_dim=16, rope_parameters=OF_MINISTRAL),
    "mixtral": lambda: sized(MixtralConfig, num_local_experts=3, num_experts_per_tok=2),
    "mixtral, windows": lambda: sized(MixtralConfig, num_local_experts=4, sliding_window=7, rms_norm_eps=1e-6),
    "qwen2": lambda: sized(Qwen2Config, rope_parameters=dict(rope_type="default", rope_theta=1e6)),
    "qwen2, yarn": lambda: sized(Qwen2Config, rope_parameters=YARN, tie_word_embeddings=True),
    "qwen3": lambda: sized(Qwen3Config, head_dim=24),
    "qwen3, biases": lambda: sized(Qwen3Config, head_dim=16, attention_bias=True),
    "qwen3, yarn of its own": lambda: sized(
        Qwen3Config, head_dim=16, rope_parameters=YARN | dict(attention_factor=1.25, beta_fast=16.0, beta_slow=2.0)
    ),
    "gemma2": gemma2,
    "gemma2 of 46 layers": lambda: gemma2(num_hidden_layers=46, query_pre_attn_scalar=16, hidden_size=64),
    "phi3": lambda: sized(Phi3Config, sliding_window=6),
    "phi3, longrope": lambda: sized(Phi3Config, **LONGROPE),
    "phi3, half of the features": lambda: sized(Phi3Config, tie_word_embeddings=True, rope_parameters=PARTIAL),
    "gemma": lambda: sized(GemmaConfig, head_dim=24),
    "gemma3_text": gemma3,
    "gemma3_text of 62 layers": lambda: gemma3(
        num_hidden_layers=62, query_pre_attn_scalar=16, hidden_size=64, rope_parameters=GEMMA3_SCALED
    ),
    "gemma4_text": gemma4,
    "gemma4_text, small": lambda: gemma4(
        num_global_key_value_heads=None,
        attention_k_eq_v=False,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=40,
        final_logit_softcapping=30.0,
    ),
    "gemma4_text, experts": lambda: gemma4(
        enable_moe_block=True, num_experts=3, top_k_experts=2, moe_intermediate_size=48
    ),
    "qwen3_moe": lambda: sized(Qwen3MoeConfig, head_dim=24, **OF_MOE),
    "granite": granite,
    "granite, biases": lambda: granite(attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "qwen3_5_text": qwen35,
    "qwen3_5_text, as many heads of values": lambda: qwen35(linear_num_value_heads=2, attention_bias=True),
    "qwen3_5_text, every other layer": lambda: qwen35(layer_types=["linear_attention", "full_attention"] * 2),
    "qwen3_5_moe_text": lambda: qwen35(Qwen3_5MoeTextConfig, **OF_SHARED),
    "lfm2": lfm2,
    "lfm2, biases": lambda: lfm2(conv_bias=True, conv_L_cache=4, tie_word_embeddings=False),
    "olmo2": lambda: sized(Olmo2Config, rms_norm_eps=1e-6),
    "olmo2, biases": lambda: sized(Olmo2Config, attention_bias=True),
    "olmo3": lambda: sized(Olmo3Config, num_hidden_layers=5, sliding_window=5),
    "seed_oss": lambda: sized(SeedOssConfig, head_dim=24),
    "seed_oss, biases": lambda: sized(SeedOssConfig, head_dim=16, attention_out_bias=True, mlp_bias=True),
    "smollm3": lambda: sized(SmolLM3Config, num_hidden_layers=5),
    "gpt_oss": lambda: sized(
        GptOssConfig,
        head_dim=16,
        num_local_experts=3,
        num_experts_per_tok=2,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters=OF_GPT_OSS,
    ),
    "gpt2": gpt2,
    "gpt2, not tied": lambda: gpt2(tie_word_embeddings=False),
}
FAMILIES = [name for name in MODELS if re.fullmatch(r"\w+", name)]


@cache
def model_of(name):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODELS[name](), dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.rand_like(weight) - 0.4)
    return model


def read(path):
    """Return all tensors of a model, and those in few bits as they are stored. Experts of gpt-oss are one tensor."""
    readers, in_few_bits, _ = open_gguf(path)
    found = {name: reader(name) for name, reader in readers.items()}
    for name in [name for name in found if re.search(r"experts\.0\.(gate_up|down)_proj$", name)]:
        names = (name.replace("experts.0", f"experts.{number}") for number in itertools.count())
        own = [*itertools.takewhile(found.__contains__, names)]
        found[name.replace("experts.0", "experts")] = torch.stack([found.pop(each) for each in own])
    return found, {name: reader(name).whole() for name, reader in in_few_bits.items()}


def same(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype and torch.equal(tensor, other[name]), name


# Blocks.


def test_codes_of_drawn_blocks_are_those_of_ggml():
    data = drawn("MXFP4", (7, 768), np.random.default_rng(1))
    blocks = data.reshape(7, -1, 17)
    blocks[1, :, 0], blocks[2, :, 0], blocks[3, :, 0] = 0, 1, 250
    found = packed("MXFP4", torch.from_numpy(data))
    want = torch.from_numpy(quants.dequantize(data, Types.MXFP4))
    assert torch.equal(found.numbers, want)  # but for the sign of zero, which ggml drops
    assert (found.dtype, found.group, found.minima, found.levels) == ("e2m1", 32, None, ())
    blocks[4, 5, 0] = 255
    with pytest.raises(CheckpointError, match="a matrix in MXFP4: expected exponents as scales, found NaN"):
        packed("MXFP4", torch.from_numpy(data))


@pytest.mark.parametrize("kind", SCALES)
def test_numbers_of_drawn_blocks_are_those_of_ggml_bit_for_bit(kind):
    data = drawn(kind, (7, 768), np.random.default_rng(1))
    blocks = data.reshape(7, -1, gguf.GGML_QUANT_SIZES[Types[kind]][1])
    for at, _ in SCALES[kind]:
        blocks[1, ::2, at : at + 2] = 0  # scales of zero, and negative ones
        blocks[2, ::2, at + 1] ^= 128
    found, stored = packed(kind, torch.from_numpy(data)), STORED[kind]
    want = torch.from_numpy(quants.dequantize(data, Types[kind]))
    assert torch.equal(found.numbers.view(torch.int32), want.view(torch.int32))
    assert (found.dtype, found.group, bool(stored.minima)) == (stored.dtype, stored.group, found.minima is not None)
    assert found.values.shape == (7, 768) and found.values.dtype == torch.int8 and found.shape == (7, 768)
    assert not found.transposed and replace(found, transposed=True).shape == (768, 7)
    for parts in (found.scales, found.minima):
        if parts is not None:
            assert parts.shape == (7, 768 // found.group) and parts.dtype == torch.float32
            assert stored.block or parts.half().float().equal(parts)
    assert len(found.levels) == (0 if stored.block is None else 1 + stored.minima)
    for (whole, units, block), parts in zip(found.levels, (found.scales, found.minima), strict=False):
        assert whole.dtype == torch.int8 and (*whole.shape, *units.shape, block) == (7, 768 // found.group, 7, 3, 256)
        assert units.half().float().equal(units) and parts.equal(whole * units.repeat_interleave(256 // found.group, 1))


@pytest.mark.parametrize(
    ("kind", "least", "most"),
    [
        *(("Q4_0", -8, 7), ("Q4_1", -8, 7), ("Q5_0", -16, 15), ("Q5_1", -16, 15), ("Q8_0", -128, 127)),
        *(("Q2_K", -8, -5), ("Q3_K", -4, 3), ("Q4_K", -8, 7), ("Q5_K", -16, 15), ("Q6_K", -32, 31)),
    ],
)
def test_values_take_their_whole_range(kind, least, most):
    found = packed(kind, torch.from_numpy(drawn(kind, (40, 768), np.random.default_rng(2))))
    assert (int(found.values.min()), int(found.values.max())) == (least, most)
    assert found.minima is None or least == LEAST[found.dtype]


@pytest.mark.parametrize("kind", [kind for kind in PACKED if kind in IN_PYTHON])
def test_numbers_that_were_quantized(kind):
    numbers = torch.randn(5, 96, generator=torch.Generator().manual_seed(0))
    data = quants.quantize(numbers.numpy(), Types[kind])
    found = packed(kind, torch.from_numpy(data)).numbers
    assert torch.equal(found, torch.from_numpy(quants.dequantize(data, Types[kind])))
    assert 0 < (found - numbers).abs().max() < 0.35


def test_types_and_their_sizes_are_those_of_ggml():
    assert {KINDS[number].name for number in KINDS} == {"F32", "F16", "BF16", *PACKED}
    for number, kind in KINDS.items():
        assert (Types(number).name, gguf.GGML_QUANT_SIZES[Types(number)]) == (kind.name, (kind.numbers, kind.size))
    others = {kind.value: kind.name for kind in Types if kind.value not in KINDS}
    assert others.items() <= UNREAD_KINDS.items()  # a release of gguf may have fewer


# Names and numbers.


@pytest.mark.parametrize("name", MODELS)
def test_tensors_are_those_of_the_model(name, tmp_path):
    model = model_of(name)
    model.save_pretrained(tmp_path)
    held = write_gguf(tmp_path / "model.gguf", model)
    found, in_few_bits = read(tmp_path / "model.gguf")
    same(found, held)
    saved = load_file(tmp_path / "model.safetensors")
    assert found.keys() == saved.keys() and not in_few_bits
    for each, tensor in found.items():
        # norms have lost a bit or two when one was added, and logarithms when their powers were written
        near = 3e-7 if each.endswith("A_log") else 1e-7 if re.match("gemma|qwen3_5", name) else 0
        assert torch.allclose(tensor, saved[each], rtol=0, atol=near), each


# A type for each kind of matrix, and all types of `PACKED`.
MIXED = {
    r"embed_tokens|wte": "Q6_K",
    r"q_proj|c_attn": "Q4_K",
    r"qkv_proj|k_proj": "Q2_K",
    r"v_proj|experts\.1\.w1": "Q8_0",
    r"o_proj|self_attn\.out_proj|attn\.c_proj": "Q3_K",
    r"conv\.(in|out)_proj|linear_attn\.in_proj": "Q4_0",
    r"linear_attn\.out_proj": "Q4_K",
    r"gate_proj|\.w1|c_fc": "Q5_K",
    r"gate_up_proj|up_proj|\.w3": "Q4_1",
    r"down_proj|\.w2|mlp\.c_proj": "Q5_1",
    r"lm_head": "Q5_0",
}


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gpt_oss"])  # experts are one tensor
def test_matrices_in_few_bits(family, tmp_path):
    model = large(family)
    held = write_gguf(tmp_path / "model.gguf", model, MIXED)
    found, in_few_bits = read(tmp_path / "model.gguf")
    same(found, held)
    matrices = {
        name for name, tensor in held.items() if tensor.ndim == 2 and not re.search(r"wpe|\.gate\.|expert_gate", name)
    }
    how = attributes_of(tmp_path / "model.gguf")["quantization_config"]
    assert how["quant_method"] == "gguf"
    assert in_few_bits.keys() == matrices
    assert how["matrices"].keys() == {name for name, tensor in held.items() if tensor.ndim == 2}
    assert {name for name, kind in how["matrices"].items() if kind in STORED} == matrices
    for name, matrix in in_few_bits.items():
        stored = STORED[how["matrices"][name]]
        assert (matrix.dtype, matrix.group) == (stored.dtype, stored.group)
        assert matrix.shape == held[name].shape
        assert torch.equal(matrix.numbers.T if matrix.transposed else matrix.numbers, held[name])
        assert matrix.transposed == bool(re.search(r"\.c_\w+\.weight", name))
    assert with_numbers(model, held, tmp_path / "numbers").dtype == torch.float32


@pytest.mark.slow  # needs accelerate, which `make test-all` installs
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "phi3", "gpt2"])
def test_transformers_reads_the_same_numbers(family, tmp_path):
    """Given the configuration: it does not read the size of Qwen3's heads."""
    path, options = tmp_path / "model.gguf", dict(config=large(family).config, dtype=torch.float32)
    write_gguf(path, large(family), MIXED)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, **options).state_dict()
    for name, tensor in read(tmp_path / "model.gguf")[0].items():
        assert torch.equal(tensor, theirs[name]), name


@cache
def large(family):
    """A model of one layer of each kind with rows of 256, as K types need them."""
    config = MODELS[family]()
    changes = dict(num_hidden_layers=1, hidden_size=256, intermediate_size=256, head_dim=64, layer_types=None)
    changes |= dict(moe_intermediate_size=256, shared_expert_intermediate_size=256)
    kinds = dict(lfm2="conv", gemma4_text="sliding_attention")
    if first := (kinds | dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), "linear_attention")).get(family):
        changes |= dict(num_hidden_layers=2, layer_types=[first, "full_attention"], linear_value_head_dim=128)
    changes |= dict(per_layer_config={1: dict(head_dim=64, num_key_value_heads=1)})
    sizes = dict(n_layer=1, n_embd=256, n_inner=1024) if family == "gpt2" else changes
    given = config.to_dict()
    torch.manual_seed(0)
    config = type(config)(**given | {name: size for name, size in sizes.items() if name in given})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@pytest.mark.parametrize("name", MODELS)
def test_a_family_takes_the_configuration_and_finds_its_weights(name, tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, model_of(name), "Q8_0")
    attributes, (readers, in_few_bits, _) = attributes_of(path), open_gguf(path)
    del attributes["quantization_config"]
    model = family_of(attributes["model_type"])(completed(attributes), n_positions=[16], context_length_estimate=8)
    decoder = model.decoder_on(absent_runtime(1))
    read = [key for weight in decoder.read(Checkpoint(path, readers, packed=in_few_bits)) for key in weight.keys]
    assert sorted(read, key=str) == sorted(dict(expand(decoder.programs.table, decoder.programs.layers)), key=str)


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_tensors_in_two_bytes(kind, tmp_path):
    held = write_gguf(tmp_path / "model.gguf", model_of("gpt2"), kind)
    found, in_few_bits = read(tmp_path / "model.gguf")
    same(found, held)
    assert not in_few_bits
    assert found["transformer.h.1.attn.c_attn.weight"].dtype == dict(F16=torch.float16, BF16=torch.bfloat16)[kind]


def test_experts_may_each_have_a_tensor(tmp_path):
    """As in older files."""
    path, names = tmp_path / "model.gguf", {}

    def taken_apart(writer):
        [tensors] = writer.tensors
        for name in [name for name in tensors if "_exps" in name]:
            stack = tensors.pop(name)
            for number, tensor in enumerate(stack.tensor):
                names[name.replace("_exps", f".{number}")] = name
                writer.add_tensor(name.replace("_exps", f".{number}"), tensor, raw_dtype=stack.dtype)

    held = write_gguf(path, model_of("mixtral"), "Q8_0", taken_apart)
    assert names["blk.1.ffn_gate.2.weight"] == "blk.1.ffn_gate_exps.weight"
    found, in_few_bits = read(path)
    same(found, held)
    assert len(in_few_bits) == 2 + 2 * (4 + 3 * 3)


def test_writes_never_reach_the_file(tmp_path):
    path = tmp_path / "model.gguf"
    held = write_gguf(path, model_of("llama"))
    content = path.read_bytes()
    for tensor in read(path)[0].values():
        tensor.zero_()
    assert path.read_bytes() == content
    same(read(path)[0], held)


def test_nothing_is_read_before_it_is_asked_for(tmp_path, monkeypatch):
    path = tmp_path / "model.gguf"
    write_gguf(path, model_of("llama"), "Q4_0")
    asked = []
    rows = StoredTensor.rows
    monkeypatch.setattr(StoredTensor, "rows", lambda tensor: asked.append(tensor.name) or rows(tensor))
    attributes_of(path)
    readers, in_few_bits, _ = open_gguf(path)
    assert not asked
    name = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(readers[name](name), in_few_bits[name](name).whole().numbers)
    assert asked == ["blk.1.attn_q.weight"] * 2


# Configurations.

NOT_IN_FILES = {"_name_or_path", "architectures", "dtype", "transformers_version", "torch_dtype"}


@pytest.mark.parametrize("name", MODELS)
def test_the_configuration_is_that_of_the_model(name, tmp_path):
    config = model_of(name).config
    write_gguf(tmp_path / "model.gguf", model_of(name))
    attributes = attributes_of(tmp_path / "model.gguf")
    found, want = (dict(each) for each in (completed(attributes), completed(config.to_dict())))
    for each in NOT_IN_FILES:
        found.pop(each, None), want.pop(each, None)
    if want.get("head_dim") is None:
        want.pop("head_dim", None)
        assert found.pop("head_dim", 16) == 16
    if config.model_type == "gpt2":
        want |= dict(n_inner=256)
    rotated = found.get("rope_parameters", {}).get("partial_rotary_factor", 1.0)
    assert found.pop("partial_rotary_factor", 1.0) == (1.0 if "qwen3_5" in name else rotated)  # there alone
    if "longrope" in name:
        magnitude = found["rope_parameters"].pop("attention_factor")
        assert magnitude == pytest.approx((1 + np.log(4) / np.log(16)) ** 0.5)
    assert found == want


NOT_READ = "istral|mixtral|3.1|3.2|linear|yarn|gemma$|gemma4|granite|smollm3|gpt_oss|olmo|seed_oss|qwen3_5"


@pytest.mark.parametrize("name", [name for name in MODELS if not re.search(NOT_READ, name)])
def test_what_transformers_reads_of_a_file(name, tmp_path):
    """It does not read scaled positions, Mistral's windows, Mixtral's experts, gpt-oss's positions, OLMo, Seed-OSS,
    Qwen 3.5, what differs by layer in Gemma 4, and more: see `GGUF_CONFIG_MAPPING`.

    Of Gemma 3, it does not read which positions are scaled.
    """
    path = tmp_path / "model.gguf"
    write_gguf(path, model_of(name))
    theirs, mine = AutoConfig.from_pretrained(tmp_path, gguf_file=path.name).to_dict(), completed(attributes_of(path))
    family = model_of(name).config.model_type.removesuffix("_text")
    compared = set(GGUF_CONFIG_MAPPING[family].values()) & theirs.keys()
    compared |= {"vocab_size", "tie_word_embeddings", "model_type", "bos_token_id", "eos_token_id", "pad_token_id"}
    compared -= {"rope_theta", "rms_norm_eps", "layer_norm_epsilon", "n_ctx", "feed_forward_length", None}
    assert len(compared) > 8
    assert {each: mine[each] for each in compared} == {each: theirs[each] for each in compared}
    if "rope_parameters" in theirs and family != "gemma3":
        assert theirs["rope_parameters"]["rope_theta"] == mine["rope_parameters"]["rope_theta"]


def changed(path, name, **values):
    """Write a model whose metadata has other values, or with None lacks them. A key may be one of the architecture."""

    def change(writer):
        for key, value in values.items():
            full = key.replace("__", ".")
            full = full if full.split(".")[0] in ("general", "tokenizer", "split") else f"{writer.arch}.{full}"
            writer.kv_data[0].pop(full, None)
            if value is not None:
                writer.add_key_value(full, *value)

    write_gguf(path, model_of(name), change=change)
    return path


U32, I32, F32, STRING, BOOL, ARRAY = (
    getattr(gguf.GGUFValueType, name) for name in ("UINT32", "INT32", "FLOAT32", "STRING", "BOOL", "ARRAY")
)


def test_what_files_leave_out_is_what_llama_cpp_takes(tmp_path):
    path = tmp_path / "model.gguf"
    missing = dict(attn_logit_softcapping=None, final_logit_softcapping=None, attention__sliding_window=None)
    found = attributes_of(changed(path, "gemma2", **missing))
    caps = found["attn_logit_softcapping"], found["final_logit_softcapping"]
    assert (*caps, found["sliding_window"], found["rope_theta"]) == (50.0, 30.0, 4096, 10000.0)
    found = attributes_of(changed(path, "llama, heads that all have keys", attention__head_count_kv=None))
    assert found["num_key_value_heads"] == 4
    found = attributes_of(changed(path, "qwen3", attention__key_length=None, attention__value_length=None))
    assert found["head_dim"] == 16
    found = attributes_of(changed(path, "llama, heads of their own size", attention__key_length=None, vocab_size=None))
    assert (found["head_dim"], found["vocab_size"]) == (24, 40)
    found = attributes_of(changed(path, "llama", rope__scale_linear=(4.0, F32)))
    assert found["rope_scaling"] == dict(rope_type="linear", factor=4.0)
    assert "rope_scaling" not in attributes_of(changed(path, "llama", rope__scaling__type=("none", STRING)))
    found = attributes_of(changed(path, "ministral3", rope__scaling__type=None))
    assert (found["model_type"], found["sliding_window"]) == ("mistral", None)
    found = attributes_of(changed(path, "olmo3", attention__sliding_window_pattern=None))
    assert [kind == "full_attention" for kind in found["layer_types"]] == [False, False, False, True, False]
    found = attributes_of(changed(path, "qwen2, yarn", rope__scaling__original_context_length=None))
    assert found["rope_scaling"]["original_max_position_embeddings"] == 64


def test_ends_of_turns_are_ends_too(tmp_path):
    path, ends = tmp_path / "model.gguf", dict(tokenizer__ggml__eot_token_id=(7, U32))
    assert attributes_of(changed(path, "llama", **ends))["eos_token_id"] == [2, 7]
    ends |= dict(tokenizer__ggml__eom_token_id=(9, U32), tokenizer__ggml__eos_token_id=(7, U32))
    assert attributes_of(changed(path, "llama", **ends))["eos_token_id"] == [7, 9]
    tokens = [f"<{number}>" for number in range(40)]
    tokens[6], tokens[11], tokens[12] = "<|end|>", "<end_of_turn>", "<|end of turn|>"
    texts = dict(tokenizer__ggml__tokens=(tokens, ARRAY, STRING))
    assert attributes_of(changed(path, "llama", **texts))["eos_token_id"] == [2, 6, 11]
    assert attributes_of(changed(path, "llama", **texts | ends))["eos_token_id"] == [7, 9, 6, 11]
    assert attributes_of(changed(path, "gpt_oss", **texts))["eos_token_id"] == [2, 11]
    none = {f"tokenizer__ggml__{name}_token_id": None for name in ("bos", "eos", "padding")}
    found = attributes_of(changed(path, "llama", **none))
    assert [found[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [None] * 3


REFUSED = {
    "lacks 'general.architecture'": ("llama", dict(general__architecture=None)),
    "'qwen2.embedding_length'": ("qwen2", dict(embedding_length=None)),
    "'gpt2.attention.layer_norm_epsilon'": ("gpt2", dict(attention__layer_norm_epsilon=None)),
    "'llama.expert_used_count'": ("mixtral", dict(expert_used_count=None)),
    "the architecture 'bert' cannot be read: supported are gemma, gemma2, gemma3, gemma4, gpt2, granite": (
        "llama",
        dict(general__architecture=("bert", STRING)),
    ),
    "expected a model, found a file of type 'adapter'": ("llama", dict(general__type=("adapter", STRING))),
    "'llama.block_count' = many, expected one number": ("llama", dict(block_count=("many", STRING))),
    "'llama.block_count' = True, expected one number": ("llama", dict(block_count=(True, BOOL))),
    "'llama.block_count' = 0, expected a positive number": ("llama", dict(block_count=(0, U32))),
    "expected tensors of 3 layers, as llama.block_count says, got those of 2": ("llama", dict(block_count=(3, U32))),
    "'llama.rope.freq_base' = nan, expected a positive number": ("llama", dict(rope__freq_base=(float("nan"), F32))),
    "'llama.rope.scaling.type' = 1, expected text": ("llama", dict(rope__scaling__type=(1, U32))),
    "keys that are not supported: llama.attention.clamp_kqv": ("llama", dict(attention__clamp_kqv=(8.0, F32))),
    "keys that are not supported: llama.logit_scale": ("llama", dict(logit_scale=(8.0, F32))),
    "keys that are not supported: gemma2.rope.freq_base_swa": ("gemma2", dict(rope__freq_base_swa=(1e5, F32))),
    "keys that are not supported: gemma3.final_logit_softcapping": (
        "gemma3_text",
        dict(final_logit_softcapping=(30.0, F32)),
    ),
    "features in keys as in values, got 24 and 16": ("qwen3", dict(attention__value_length=(16, U32))),
    "as in values, got 0 and 0": (
        "qwen3",
        dict(attention__key_length=None, attention__value_length=None, attention__head_count=(1000, U32)),
    ),
    "8 of the 16 features of a head rotate": (
        "llama",
        dict(rope__dimension_count=(8, U32), attention__key_length=(16, U32)),
    ),
    "rope.scaling.type = 'su' with the factor 0.0": ("llama", dict(rope__scaling__type=("su", STRING))),
    "rope.scaling.type = 'yarn' with the factor 0.0": ("llama", dict(rope__scaling__type=("yarn", STRING))),
    "rope.scaling.attn_factor = 2.0": ("llama", dict(rope__scaling__attn_factor=(2.0, F32))),
    "expected rope_factors_long.weight with 8 numbers, got none": (
        "phi3",
        dict(rope__scaling__type=("longrope", STRING)),
    ),
    "rope_freqs.weight does not have LLaMA 3's factors for scaling by 8 or 32": (
        "llama 3.1",
        dict(rope__freq_base=(1e4, F32)),
    ),
    "'lfm2.attention.head_count_kv' = [0, 2], expected 3 numbers": (
        "lfm2",
        dict(attention__head_count_kv=([0, 2], ARRAY, U32)),
    ),
    "'lfm2.attention.head_count_kv' = [0, 2, -1], expected 3 numbers": (
        "lfm2",
        dict(attention__head_count_kv=([0, 2, -1], ARRAY, I32)),
    ),
    "one number of heads of keys in all layers that have some, got [1, 2]": (
        "lfm2",
        dict(attention__head_count_kv=([1, 2, 0], ARRAY, U32)),
    ),
    "in all layers that have some, got []": ("lfm2", dict(attention__head_count_kv=(0, U32))),
    "'olmo2.attention.sliding_window_pattern' = many, expected numbers": (
        "olmo3",
        dict(attention__sliding_window_pattern=("many", STRING)),
    ),
    "4 layers that guess tokens, of 4": ("qwen3_5_text", dict(nextn_predict_layers=(4, U32))),
    "6 features of 4 heads of values, for 2 of keys, cannot be divided": (
        "qwen3_5_text",
        dict(ssm__time_step_rank=(4, U32), ssm__inner_size=(6, U32)),
    ),
    "'blk.0.ssm_dt.bias' has sizes [6], expected 4 rows": (
        "qwen3_5_text",
        dict(ssm__time_step_rank=(4, U32), ssm__inner_size=(128, U32)),
    ),
    "expected rows of 8 heads with 16 features": ("llama", dict(attention__head_count=(8, U32))),
    "expected matrices of 4 experts": ("mixtral", dict(expert_count=(4, U32))),
    "with and without windows, which have keys of their own, got 4 with keys, of 4": (
        "gemma4_text",
        dict(attention__sliding_window_pattern=([True] * 4, ARRAY, BOOL)),
    ),
    "with and without windows, which have keys of their own, got 1 with keys, of 4": (
        "gemma4_text",
        dict(attention__shared_kv_layers=(3, U32)),
    ),
    "which have keys of their own, got 0 with keys, of 4": ("gemma4_text", dict(attention__shared_kv_layers=(9, U32))),
    "in all layers with windows, and in all others, got [2, 1, 2, 2]": (
        "gemma4_text",
        dict(attention__head_count_kv=([2, 1, 2, 2], ARRAY, U32)),
    ),
    "in keys as in values, which all have positions, got 32, 16 and 32": (
        "gemma4_text",
        dict(attention__value_length=(16, U32)),
    ),
    "which all have positions, got 16, 16 and 8": ("gemma4_text", dict(rope__dimension_count_swa=(8, U32))),
    "feed-forward blocks of the sizes [96, 96, 96, 100]": (
        "gemma4_text",
        dict(feed_forward_length=([96, 96, 96, 100], ARRAY, U32)),
    ),
    "feed-forward blocks of the sizes [96, 96, 96, 192]": (  # in two readers of keys or in none
        "gemma4_text, small",
        dict(feed_forward_length=([96, 96, 96, 192], ARRAY, U32)),
    ),
    "rope.scaling.type = 'linear' is not supported with": (
        "gemma4_text",
        dict(rope__scaling__type=("linear", STRING)),
    ),
}


@pytest.mark.parametrize("said", REFUSED)
def test_a_configuration_that_is_not_supported_is_refused(said, tmp_path):
    name, values = REFUSED[said]
    path = changed(tmp_path / "model.gguf", name, **values)
    for reading in (attributes_of, open_gguf):
        with pytest.raises(CheckpointError) as error:
            reading(path)
        assert said in str(error.value) and str(error.value).startswith(f"{path}: ")


def test_layers_that_guess_tokens_are_left_out(tmp_path):
    path, config = tmp_path / "model.gguf", model_of("qwen3_5_text").config

    def change(writer):
        for key, value in dict(block_count=config.num_hidden_layers + 1, nextn_predict_layers=1).items():
            writer.kv_data[0].pop(f"qwen35.{key}", None)
            writer.add_uint32(f"qwen35.{key}", value)
        for name in ("nextn.eh_proj", "attn_q"):
            writer.add_tensor(f"blk.{config.num_hidden_layers}.{name}.weight", np.zeros((64, 128), np.float32))

    held = write_gguf(path, model_of("qwen3_5_text"), change=change)
    same(read(path)[0], held)
    assert attributes_of(path)["num_hidden_layers"] == config.num_hidden_layers == 4


def test_heads_of_values_must_have_whole_groups(tmp_path):
    path = tmp_path / "model.gguf"
    config = qwen35(linear_num_value_heads=4, linear_value_head_dim=16)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    write_gguf(path, model, {"linear_attn.out_proj": "Q8_0"})
    with pytest.raises(CheckpointError, match="Q8_0, where 32 inputs share a scale, has heads of 16 inputs"):
        open_gguf(path)


@pytest.mark.parametrize(
    ("factors", "said"),
    [
        ([1.0, 2.0, *[1e30] * 14], "expected ones in rope_freqs.weight, and then numbers above 1e+29"),
        ([1e30] * 16, "expected ones in rope_freqs.weight"),
        ([1e30, *[1.0] * 15], "expected ones in rope_freqs.weight"),
        ([1.0] * 8, "expected rope_freqs.weight with 16 numbers"),
    ],
)
def test_factors_of_gemma4_say_which_features_rotate(factors, said, tmp_path):
    def change(writer):
        del writer.tensors[0]["rope_freqs.weight"]
        writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))

    write_gguf(tmp_path / "model.gguf", model_of("gemma4_text"), change=change)
    with pytest.raises(CheckpointError, match=re.escape(said)):
        attributes_of(tmp_path / "model.gguf")


def test_values_of_gemma4_are_in_all_layers_or_in_none(tmp_path):
    def change(writer):
        del writer.tensors[0]["blk.3.attn_v.weight"]

    model = AutoModelForCausalLM.from_config(gemma4(attention_k_eq_v=False), dtype=torch.float32)
    write_gguf(tmp_path / "model.gguf", model, change=change)
    with pytest.raises(CheckpointError, match="expected values in all layers without windows that have keys"):
        attributes_of(tmp_path / "model.gguf")


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_factors_of_llama3_are_told_apart_where_they_differ(factor, tmp_path):
    path = tmp_path / "model.gguf"
    model = model_of("llama 3.1" if factor == 8 else "llama 3.2")
    factors = llama3_factors(model.config)
    assert 1 in factors and factor in factors and any(1 < each < factor for each in factors)
    write_gguf(path, model)
    assert attributes_of(path)["rope_scaling"]["factor"] == factor

    def shifted(writer):
        writer.tensors[0]["rope_freqs.weight"].tensor[5] *= 1 + 1e-4

    write_gguf(path, model, change=shifted)
    with pytest.raises(CheckpointError, match="does not have LLaMA 3's factors"):
        attributes_of(path)


# Split models.


@pytest.fixture
def parts(tmp_path):
    held = write_gguf(tmp_path / "model.gguf", model_of("llama"), "Q4_0", split=8)
    found = sorted(tmp_path.glob("*.gguf"))
    assert [path.name for path in found] == [f"model-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    return found, held


def test_any_file_of_a_split_model_opens_all(parts):
    paths, held = parts
    for path in paths:
        same(read(path)[0], held)
        assert attributes_of(path)["hidden_size"] == 64


def test_files_of_a_split_model_must_belong_together(parts):
    paths, _ = parts
    content = [path.read_bytes() for path in paths]
    paths[1].unlink()
    with pytest.raises(
        CheckpointError, match=r"00002-of-00003.gguf: expected a regular file, which belongs to model-0"
    ):
        open_gguf(paths[0])
    paths[1].write_bytes(content[2])
    with pytest.raises(
        CheckpointError, match=r"00002-of-00003.gguf: .* split.no and split.count \[2, 3\], expected \[1, 3\]"
    ):
        open_gguf(paths[0])
    paths[1].write_bytes(content[1].replace(b"blk.0.ffn_up.weight", b"blk.0.ffn_xx.weight").replace(b"xx", b"up"))
    other = paths[0].with_name("model.gguf")
    other.write_bytes(content[0])
    with pytest.raises(
        CheckpointError, match=r"split.count in the metadata is 3, expected a name that ends with -00001-of-00003"
    ):
        open_gguf(other)
    twice = content[0].replace(
        b"split.tensors.count" + struct.pack("<Ii", 5, 21), b"split.tensors.count" + struct.pack("<Ii", 5, 22)
    )
    assert twice != content[0]
    paths[0].write_bytes(twice)
    with pytest.raises(CheckpointError, match=r"expected 22 tensors in the 3 files, got 21"):
        open_gguf(paths[0])


# Damage.

ARCHITECTURE = ("general.architecture", TEXT, text("llama"))
MATRIX = ("token_embd.weight", (32, 4), 0, 0)  # dims are written with those of rows first
DATA = bytes(4 * 32 * 4)


def listed(kind, count, content=b""):
    return struct.pack("<IQ", kind, count) + content


def value(code, number):
    return struct.pack(f"<{code}", number)


DAMAGED = {
    "begins with b'GGML', not with b'GGUF'": raw(magic=b"GGML"),
    "begins with b'GG', not with b'GGUF'": b"GG",
    "cannot mmap an empty file": b"",
    "the version would end at 8, behind the end of the file at 6": b"GGUF\x03\x00",
    "the file has version 1 of GGUF: supported are 2 and 3": raw(version=1),
    "the file has version 4 of GGUF": raw(version=4),
    "the file is big-endian, which cannot be read": raw(version=0x03000000),
    "9223372036854775808 tensors and 0 values do not fit into the file": raw(counts=(1 << 63, 0)),
    "0 tensors and 1099511627776 values do not fit": raw(counts=(0, 1 << 40)),
    "a key of the metadata has 18446744073709551615 bytes, expected at most 65535": raw(
        counts=(0, 1), data=b"\xff" * 8 + bytes(99), alignment=1
    ),
    "a key of the metadata would end at": raw(counts=(0, 1), data=value("Q", 500) + bytes(99), alignment=1),
    "a key of the metadata, at 32, is not UTF-8": raw([(b"\xff\xfe", 4, value("I", 1))], [MATRIX], DATA),
    "the value of 'a', at 45, is not UTF-8": raw([("a", TEXT, text(b"\x80"))], [MATRIX], DATA),
    "the value of 'a' would end at": raw([("a", TEXT, value("Q", 1 << 62))], [MATRIX], DATA),
    "the value of 'a' has the type 13, which GGUF does not have": raw([("a", 13, b"")], [MATRIX], DATA),
    "the value of 'a' is an array of the type 9, expected numbers or text": raw(
        [("a", LIST, listed(LIST, 1, listed(4, 0)))], [MATRIX], DATA
    ),
    "the value of 'b' would end at": raw([("b", LIST, listed(12, 1 << 61))], [MATRIX], DATA),
    "the value of 'c', 1152921504606846976 texts, goes on behind the end": raw(
        [("c", LIST, listed(TEXT, 1 << 60))], [MATRIX], DATA
    ),
    "the value of 'd' would end at": raw([("d", LIST, listed(TEXT, 1, value("Q", 1 << 50)))], [MATRIX], DATA),
    "the key 'a' occurs twice": raw([("a", 4, value("I", 1))] * 2, [MATRIX], DATA),
    "the tensor 'token_embd.weight' occurs twice": raw([], [MATRIX] * 2, DATA),
    "the name of a tensor, at 32, is not UTF-8": raw([], [(b"\xc3(", (32, 4), 0, 0)], DATA),
    "has 0 dimensions, expected 1 to 4": raw([], [("a", (), 0, 0)], DATA),
    "has 5 dimensions, expected 1 to 4": raw([], [("a", (1,) * 5, 0, 0)], DATA),
    "has sizes [0, 32], expected positive ones": raw([], [("a", (32, 0), 0, 0)], DATA),
    "'a' must lie in the file, aligned to 32, but it is from 96 to 340282366920938463463374607431768211552 of": raw(
        [], [("a", (1 << 63, 1 << 63), 0, 0)], DATA
    ),
    "but it is from 96 to 736 of 608 bytes": raw([], [("a", (32, 5), 0, 0)], DATA),
    "but it is from 68 to 196 of 576 bytes, 4 after 64": raw([], [("a", (32,), 0, 4)], DATA),
    "'b' begins at 128, before 'a' ends at 160": raw([], [("a", (16,), 0, 0), ("b", (8,), 0, 32)], DATA),
    "has rows of 48 numbers, expected multiples of 32, the block of Q4_0": raw([], [("a", (48, 2), 2, 0)], DATA),
    "has rows of 32 numbers, expected multiples of 256, the block of Q6_K": raw([], [("a", (32, 2), 14, 0)], DATA),
    "'a' has the type IQ4_NL: supported are F32, F16, Q4_0, Q4_1, Q5_0": raw([], [("a", (32, 2), 20, 0)], DATA),
    "'a' has the type TQ1_0: supported are": raw([], [("a", (256, 2), 34, 0)], DATA),
    "'a' has the type 99: supported are": raw([], [("a", (32, 2), 99, 0)], DATA),
    "general.alignment must be a power of two from 8, got 24": raw([("general.alignment", 4, value("I", 24))]),
    "general.alignment must be a power of two from 8, got 0": raw([("general.alignment", 4, value("I", 0))]),
    "general.alignment must be a power of two from 8, got 32.0": raw([("general.alignment", 6, value("f", 32))]),
    "split.count in the metadata is many, expected one number": raw([("split.count", TEXT, text("many"))]),
    "the metadata lacks 'general.architecture'": raw([], [MATRIX], DATA),
    "expected a matrix token_embd.weight, got sizes []": raw([ARCHITECTURE], [("a", (32, 4), 0, 0)], DATA),
}


@pytest.mark.parametrize("said", DAMAGED)
def test_a_damaged_file_is_an_error_that_says_what_is_wrong(said, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(DAMAGED[said])
    for reading in (attributes_of, open_gguf):
        with pytest.raises(CheckpointError) as error:
            reading(path)
        assert said in str(error.value) and str(error.value).startswith(f"{path}: ")
        assert len(str(error.value)) < 600


def test_no_file_is_an_error_that_names_it(tmp_path):
    for path in (tmp_path, tmp_path / "none.gguf"):
        with pytest.raises(CheckpointError, match=f"{path}: expected a regular file, found"):
            open_gguf(path)


def test_a_file_that_was_cut_after_it_was_opened(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, model_of("llama"))
    readers, *_ = open_gguf(path)
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(CheckpointError, match=r"cannot map 'blk\.1\.ffn_down\.weight'"):
        readers[name := "model.layers.1.mlp.down_proj.weight"](name)


def renamed(stored, other, kind="F32"):
    """Return a change that gives a stored tensor another name, and with `kind` another type."""

    def change(writer):
        tensor = writer.tensors[0].pop(stored)
        tensor.tensor = quants.quantize(tensor.tensor, Types[kind])
        writer.add_tensor(other, tensor.tensor, raw_dtype=Types[kind])

    return change


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("llama", ("blk.0.attn_norm.weight", "blk.0.attn_q_norm.weight"), "is none of the tensors of a llama model"),
        ("gemma2", ("blk.0.attn_norm.weight", "blk.0.norm"), "'blk.0.norm' is none of the tensors of a gemma2 model"),
        ("gpt2", ("position_embd.weight", "blk.0.ffn_up.1.weight"), "is none of the tensors of a gpt2 model"),
        ("mixtral", ("blk.1.attn_v.weight", "blk.1.ffn_up.0.weight"), "are both model.layers.1.block_sparse_moe.ex"),
        ("llama", ("output_norm.weight", "output_norm.weight", "Q8_0"), "has the type Q8_0, which only matrices have"),
        ("llama 3.1", ("output_norm.weight", "output_norm.weight", "BF16"), None),
        ("gpt_oss", ("blk.1.ffn_gate_exps.weight", "blk.1.attn_sinks.weight "), "none of the tensors of a gpt_oss mo"),
        ("gpt_oss", ("blk.1.ffn_up_exps.bias", "blk.1.ffn_up_exps.bias", "BF16"), "must have one type and the same si"),
        ("phi3, longrope", ("rope_factors_long.weight", "rope_factors.weight"), "rope.scaling.attn_factor = 1.2247449"),
        ("phi3, longrope", ("rope_factors_short.weight", "rope_factors.weight"), "expected rope_factors_short.weight"),
    ],
)
def test_tensors_that_a_model_does_not_have_so(name, change, said, tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, model_of(name), change=renamed(*change))
    if said is None:
        assert read(path)[0]["model.norm.weight"].dtype == torch.bfloat16
        return
    with pytest.raises(CheckpointError, match=re.escape(said) if "(" in said else said):
        open_gguf(path)


def test_all_types_of_metadata(tmp_path):
    path = tmp_path / "model.gguf"
    numbers = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
    values = {f"number {kind}": (kind, value(code, 1)) for kind, code in numbers.items()}
    values["negative"], values["text"] = (11, value("q", -(1 << 40))), (TEXT, text("Ünïcode 😊\0"))
    values["list"] = LIST, listed(TEXT, 3, text("a") + text("") + text("ö"))
    values["floats"] = LIST, listed(6, 2, struct.pack("<2f", 0.5, -2))
    values["nothing"] = LIST, listed(7, 0)
    path.write_bytes(raw([(key, *rest) for key, rest in values.items()], [MATRIX], DATA))
    found = dict(open_files(path).metadata)
    arrays = {key: found.pop(key) for key in ("list", "floats", "nothing")}
    assert all(isinstance(array, Elements) for array in arrays.values())
    assert {key: array.read() for key, array in arrays.items()} == dict(
        list=["a", "", "ö"], floats=[0.5, -2], nothing=[]
    )
    assert [array.count for array in arrays.values()] == [3, 2, 0]
    assert found.pop("negative") == -(1 << 40) and found.pop("text") == "Ünïcode 😊\0"
    assert found == dict.fromkeys([f"number {kind}" for kind in numbers], 1)
    assert found["number 7"] is True and isinstance(found["number 12"], float)


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_alignments_and_versions(alignment, tmp_path):
    path = tmp_path / "model.gguf"
    values = [("general.alignment", 4, value("I", alignment)), ("general.name", TEXT, text("x" * alignment))]
    numbers = np.arange(128, dtype=np.float32)
    for version in (2, 3):
        path.write_bytes(raw(values, [MATRIX], numbers.tobytes(), version=version, alignment=alignment))
        [tensor] = open_files(path).tensors.values()
        assert tensor.start % alignment == 0 and tensor.shape == (4, 32)
        assert torch.equal(tensor.rows().view(torch.float32).flatten(), torch.from_numpy(numbers))


# Mutations.


def mutated(chance, content, header):
    """Flip, cut out, insert or exchange a few bytes, most of them in the header; or cut the file."""
    content = bytearray(content)
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        at, size = chance.randrange(header), chance.choice([1, 1, 4, 8])
        kind = chance.randrange(7)
        if kind < 2:
            content[at] ^= 1 << chance.randrange(8)
        elif kind == 2:
            content[at : at + size] = chance.randbytes(size)
        elif kind == 3:
            content[at : at + size] = chance.choice([b"\0", b"\xff", b"\x7f", b"\x01"]) * size
        elif kind == 4:
            content[at:at] = chance.randbytes(size)
        elif kind == 5:
            del content[at : at + size]
        elif chance.random() < 0.3:
            del content[chance.randrange(len(content)) :]
            return bytes(content)
    return bytes(content)


def test_mutations_are_read_as_something_or_refused(tmp_path):
    path = tmp_path / "model.gguf"
    sizes = dict(hidden_size=32, num_hidden_layers=1, intermediate_size=32, vocab_size=6)
    config = sized(LlamaConfig, **sizes, head_dim=16, rope_parameters=LLAMA3 | dict(factor=8.0))
    write_gguf(path, AutoModelForCausalLM.from_config(config), {r"[qk]_proj": "Q4_1", "mlp|embed": "Q8_0"})
    content = path.read_bytes()
    wanted, header = attributes_of(path), min(tensor.start for tensor in open_files(path).tensors.values())
    outcomes = Counter()
    with open(path, "r+b", buffering=0) as file:  # opened once: to write it anew takes most of the time
        for seed in range(5000):
            file.seek(0)
            file.truncate(file.write(mutated(random.Random(seed), content, header)))
            outcomes[outcome(path, wanted)] += 1
    assert outcomes["refused"] > 1500 and outcomes["read"] > 300 and outcomes["other"] > 50, outcomes


def outcome(path, wanted):
    """Read all of a file, check what comes, and say whether it was refused, or read as it was, or otherwise."""
    try:
        attributes, (found, in_few_bits) = attributes_of(path), read(path)
    except CheckpointError as error:
        said = str(error)
    else:
        assert json.loads(json.dumps(attributes)) == attributes and attributes["model_type"] in FAMILIES
        assert all(isinstance(tensor, torch.Tensor) and tensor.dtype.is_floating_point for tensor in found.values())
        for name, matrix in in_few_bits.items():
            assert matrix.values.dtype == torch.int8 and matrix.shape == found[name].shape
        return "read" if attributes == wanted else "other"
    assert str(path) in said and said.encode()
    return "refused"
