"""Models from GGUF files: matrices stay in the types of the file, which differ from matrix to matrix and by layer."""

import json
import re
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from gguf_files import PACKED, with_numbers, write_gguf
from parity import assert_close, prompts, randomized
from test_passed_through import expected, logits
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from transformers_neuronx import NeuronAutoModelForCausalLM
from transformers_neuronx.config import NeuronConfig, QuantizationConfig
from transformers_neuronx.errors import CheckpointError, ConfigError
from transformers_neuronx.llama.model import LlamaForSampling
from transformers_neuronx.weights import gguf
from transformers_neuronx.weights.checkpoint import open_checkpoint

TINY_KJV = Path(__file__).parents[2] / "examples" / "tiny-kjv"
FAMILIES = (
    "llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma2", "phi3", "gpt2", "gemma", "gemma3_text", "qwen3_moe",
    "granite", "smollm3", "gpt_oss", "lfm2", "olmo2", "olmo3", "qwen3_5_text",
    "qwen3_5_moe_text", "seed_oss", "ministral3", "gemma4_text", "qwen3_next",
)  # fmt: skip
SIZES = dict(
    vocab_size=96, hidden_size=192, intermediate_size=192, num_hidden_layers=3, num_attention_heads=6,
    num_key_value_heads=3, head_dim=32, max_position_embeddings=32, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
OF_QWEN35 = dict(
    layer_types=["linear_attention", "full_attention", "linear_attention"],
    linear_num_key_heads=3,
    linear_num_value_heads=6,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
    rope_parameters=dict(rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25),
)
OF_SHARED = dict(num_experts=3, num_experts_per_tok=2, moe_intermediate_size=96, shared_expert_intermediate_size=64)
OF_FAMILY = dict(
    gpt2=dict(n_embd=192, n_inner=768, n_layer=3, n_head=6, n_positions=32),
    gemma2=dict(query_pre_attn_scalar=32, sliding_window=5, attn_logit_softcapping=3.0),
    mistral=dict(sliding_window=5),
    mixtral=dict(num_local_experts=3),
    gemma3_text=dict(query_pre_attn_scalar=32, sliding_window=5, num_hidden_layers=7),  # the sixth reads all
    qwen3_moe=dict(num_experts=3, num_experts_per_tok=2, moe_intermediate_size=96, norm_topk_prob=True),
    granite=dict(embedding_multiplier=3.0, residual_multiplier=0.5, attention_multiplier=0.2, logits_scaling=4.0),
    smollm3=dict(num_hidden_layers=5),  # the fourth does not rotate
    ministral3=dict(
        rope_parameters=dict(
            rope_type="yarn",
            rope_theta=1e6,
            factor=4.0,
            original_max_position_embeddings=16,
            beta_fast=32.0,
            beta_slow=1.0,
            mscale=1.0,
            mscale_all_dim=1.0,
            llama_4_scaling_beta=0.1,
        )
    ),
    lfm2=dict(layer_types=["conv", "full_attention", "conv"], block_auto_adjust_ff_dim=False),
    olmo3=dict(num_hidden_layers=5, sliding_window=5),
    gemma4_text=dict(
        num_hidden_layers=6,
        layer_types=["sliding_attention", "full_attention"] * 3,
        global_head_dim=64,
        num_global_key_value_heads=3,
        attention_k_eq_v=True,
        sliding_window=5,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=32,
        vocab_size_per_layer_input=96,
        final_logit_softcapping=3.0,
        enable_moe_block=True,
        num_experts=3,
        top_k_experts=2,
        moe_intermediate_size=96,
    ),
    qwen3_5_text=OF_QWEN35,
    qwen3_next=OF_QWEN35
    | OF_SHARED
    | dict(
        num_hidden_layers=4,
        layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    ),
    qwen3_5_moe_text=OF_QWEN35 | OF_SHARED,
    gpt_oss=dict(
        num_local_experts=3,
        num_experts_per_tok=2,
        sliding_window=5,
        rope_parameters=dict(
            rope_type="yarn",
            rope_theta=150000.0,
            factor=4.0,
            original_max_position_embeddings=16,
            truncate=False,
            beta_fast=32.0,
            beta_slow=1.0,
        ),
    ),
)
# As files of llama.cpp mix types: another one for some matrices, and for some layers of these. Some matrices are plain.
MIXED = {
    r"(embed_tokens|wte)": "Q8_0",
    r"\.1\..*(v_proj|qkv|c_attn|down_proj|w2|mlp\.c_proj)": "Q5_1",
    r"(v_proj|qkv|c_attn|down_proj|w2|mlp\.c_proj)": "Q4_0",
    r"(o_proj|attn\.c_proj)": "F16",
    r"(q_proj|k_proj|up_proj|w1|w3|c_fc|linear_attn\.out_proj)": "Q4_1",
    r"(gate_proj|conv\.in_proj)": "Q5_0",
}


def reference_of(family, directory, types, **sizes):
    """Write a model's file into a directory. Return the model of Transformers with the same numbers in f32."""
    config = AutoConfig.for_model(family, **SIZES | OF_FAMILY.get(family, {}) | sizes)
    model = randomized(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight *= 0.3 if weight.ndim > 1 else 1  # else, with so many inputs, layers magnify every rounding
    held = write_gguf(directory / "model.gguf", model, types)
    return with_numbers(model, held, directory / "reference")


def loaded(path, **options):
    model = NeuronAutoModelForCausalLM.from_pretrained(path, n_positions=32, context_length_estimate=16, **options)
    model.to_neuron()
    return model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.few(4)
def test_logits_are_those_of_the_file(family, tmp_path):
    reference = reference_of(family, tmp_path, MIXED)
    model = loaded(tmp_path / "model.gguf")
    assert_close(logits(model), expected(reference))
    stored = model.options.quant.stored
    wanted = {"s8/32, f16", "s4/32, f16", "s5/32, f16 with minima", "s4/32, f16 with minima"}
    wanted |= {"s5/32, f16"} if family not in ("phi3", "gpt2", "mixtral", "gpt_oss") else set()  # with gate_proj
    assert wanted == {text for plan in stored.values() for text in plan if text != "plain"}
    assert any(len(plan) > 1 for plan in stored.values()), "a layer must differ from others"
    experts = {"moe.gate.weight", "moe.up.weight", "moe.down.weight"}
    mixture = family in ("mixtral", "qwen3_moe", "qwen3_5_moe_text", "gpt_oss", "gemma4_text", "qwen3_next")
    assert not mixture or experts <= stored.keys(), "experts stay in few bits"


@pytest.mark.parametrize("kind", ["MXFP4", "F16"])
def test_gpt_oss_as_its_files_are(kind, tmp_path):
    """Experts in MXFP4, and the rest in eight bits; or whole."""
    reference = reference_of("gpt_oss", tmp_path, {"experts": kind, r"(embed_tokens|lm_head|_proj)": "Q8_0"})
    model = loaded(tmp_path / "model.gguf", tp_degree=2)
    assert_close(logits(model), expected(reference))
    own = {plan for name, plans in model.options.quant.stored.items() if name.startswith("moe.") for plan in plans}
    assert own == ({"e2m1/32, bf16"} if kind == "MXFP4" else set())


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.few(3)
def test_every_type(kind, tmp_path):
    sizes = dict(hidden_size=256, intermediate_size=256, head_dim=64, num_attention_heads=4, num_key_value_heads=2)
    reference = reference_of("llama", tmp_path, kind, num_hidden_layers=1, **sizes)
    assert_close(logits(loaded(tmp_path / "model.gguf")), expected(reference))


# The same of K types. Rows have whole blocks of 256 inputs, and a block is eight heads.
OF_K_TYPES = dict(hidden_size=256, intermediate_size=512, num_attention_heads=8, num_key_value_heads=4)
MIXED_K = {
    r"embed_tokens": "Q6_K",
    r"\.1\..*(v_proj|down_proj)": "Q4_K",
    r"(v_proj|down_proj)": "Q6_K",
    r"(o_proj|up_proj)": "Q5_K",
    r"gate_proj": "Q4_K",
    r"q_proj": "Q3_K",
    r"k_proj": "Q2_K",
}


def test_an_output_is_unpacked_once(tmp_path, monkeypatch):
    """Values, scales, minima and their units are rows of their own, and the head is the embedding."""
    reference_of("llama", tmp_path, MIXED_K, **OF_K_TYPES, tie_word_embeddings=True)
    model = loaded(tmp_path / "model.gguf")
    unpacked = Mock(wraps=gguf.packed)
    monkeypatch.setattr(gguf, "packed", unpacked)
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    for number, weight in enumerate(model.decoder.read(checkpoint)):
        if number % 3:  # as several loaders may ask in another order
            weight.pieces()
    outputs = sum(checkpoint.shape(name)[0] for name in checkpoint.packed_readers)
    assert sum(len(call.args[1]) for call in unpacked.call_args_list) == outputs
    assert outputs == 96 + SIZES["num_hidden_layers"] * (2 * 256 + 2 * 128 + 2 * 512 + 256)


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_k_types_over_several_devices(degree, tmp_path):
    """A device has whole blocks of inputs, or blocks are as large as a head. The model's head is its embedding."""
    reference = reference_of("llama", tmp_path, MIXED_K, **OF_K_TYPES, tie_word_embeddings=True)
    model = loaded(tmp_path / "model.gguf", tp_degree=degree)
    assert_close(logits(model), expected(reference))
    assert len(model.options.quant.stored["mlp.down.weight"]) == 2
    table = {(row.name, row.only): row.shape for row in model.decoder.programs.table}
    assert table["mlp.down.weight_scale_unit", frozenset({1})] == (256, 2)
    assert table["attn.out.weight_scale_unit", None] == (256, 8)


@pytest.mark.parametrize("degree", [1, 2])
def test_k_types_of_delta_nets(degree, tmp_path):
    """Heads of values stand in another order in files. A block of 256 inputs is two of them."""
    sizes = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_value_head_dim=128)
    types = MIXED_K | {r"linear_attn\.(in_proj_(qkv|z)|out_proj)": "Q4_K"}
    reference = reference_of("qwen3_5_text", tmp_path, types, **OF_K_TYPES | sizes)
    model = loaded(tmp_path / "model.gguf", tp_degree=degree)
    assert_close(logits(model), expected(reference))
    table = {row.name: row.shape for row in model.decoder.programs.table}
    assert table["delta.out.weight_scale_unit"] == (256, 4)


def test_an_artifact_of_k_types(tmp_path):
    reference = reference_of("llama", tmp_path, MIXED_K, **OF_K_TYPES)
    model = loaded(tmp_path / "model.gguf")
    model.save(tmp_path / "artifact", sharded_weights=True)
    again = loaded(tmp_path / "artifact")
    assert again.options.quant.stored == model.options.quant.stored
    assert_close(logits(again), expected(reference))


def test_other_weights_are_quantized_to_two_levels(tmp_path):
    reference = reference_of("llama", tmp_path, "Q6_K", **OF_K_TYPES)
    model = loaded(tmp_path / "model.gguf", weights=tmp_path / "reference")
    wanted = expected(reference)
    error = (logits(model) - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()
    assert 0.01 < error < 0.12  # that of weights is 0.014, and layers of drawn numbers magnify it; in 4 bits it is 0.06


@pytest.mark.parametrize("degree", [2, 3])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.few(3)
def test_over_several_devices(family, degree, tmp_path):
    reference = reference_of(family, tmp_path, MIXED)
    assert_close(logits(loaded(tmp_path / "model.gguf", tp_degree=degree)), expected(reference))


def test_groups_of_layers_and_an_artifact(tmp_path):
    """Layers that are stored differently are different programs, also where all else is alike."""
    reference = reference_of("qwen3", tmp_path, MIXED)
    model = loaded(tmp_path / "model.gguf", unroll=1, context_unroll=1)
    wanted = expected(reference)
    assert_close(logits(model), wanted)
    [ids] = prompts(model.config.vocab_size, [9])
    ids = torch.tensor([ids])
    tokens = reference.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert torch.equal(model.sample(ids, 17, top_k=1, eos_token_override=-1), tokens)
    model.save(tmp_path / "artifact", sharded_weights=True)
    again = loaded(tmp_path / "artifact")
    assert again.options.quant.stored == model.options.quant.stored
    assert_close(logits(again), wanted)


@pytest.mark.parametrize("amp", ["bf16", "f16"])
def test_in_other_types_of_activations(amp, tmp_path):
    reference = reference_of("llama", tmp_path, MIXED)
    wanted, got = expected(reference), logits(loaded(tmp_path / "model.gguf", amp=amp))
    assert (got - wanted).abs().max() < (0.03 if amp == "bf16" else 0.004) * wanted.abs().max()


def test_plain_numbers_have_no_storages(tmp_path):
    reference = reference_of("llama", tmp_path, "F16")
    model = loaded(tmp_path / "model.gguf")
    assert model.options.quant is None and model.config.dtype == "float16"
    assert_close(logits(model), expected(reference))


def test_other_options_quantize_again(tmp_path):
    reference = reference_of("llama", tmp_path, MIXED)
    other = NeuronConfig(quant=QuantizationConfig("s8"))
    difference = logits(loaded(tmp_path / "model.gguf", neuron_config=other)) - expected(reference)
    assert 1e-4 < difference.abs().max() / expected(reference).abs().max() < 0.05


def test_weights_of_another_file_get_the_same_storages(tmp_path):
    """Those are quantized as the first file is: programs stay as they are."""
    reference = reference_of("llama", tmp_path, MIXED)
    model = loaded(tmp_path / "model.gguf", weights=tmp_path / "reference")
    difference = (logits(model) - expected(reference)).abs().max()
    assert difference < 0.02 * expected(reference).abs().max()


def test_a_directory_has_one_model(tmp_path):
    reference = reference_of("llama", tmp_path, "Q8_0")
    assert_close(logits(loaded(tmp_path)), expected(reference))
    (tmp_path / "model.gguf").rename(tmp_path / "weights.bin")
    assert_close(logits(loaded(tmp_path / "weights.bin")), expected(reference))
    for name in ("one.gguf", "other.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=r"expected one model, found one.gguf, other.gguf; pass the path of one"):
        loaded(tmp_path)


def test_commands_take_a_file(tmp_path, command):
    reference, file = reference_of("llama", tmp_path, MIXED), tmp_path / "model.gguf"
    printed, _ = command("inspect", file, "--json", "--n-positions", 32)
    weights = json.loads(printed)["weights"]
    layers = [(each["name"], each["layers"]) for each in weights if each["name"].startswith("mlp.down.weight")]
    scales = ("mlp.down.weight", 2), ("mlp.down.weight_scale", 2)
    assert layers == [*scales, ("mlp.down.weight", 1), ("mlp.down.weight_scale", 1), ("mlp.down.weight_minimum", 1)]
    assert sum(each["elements"] * each["layers"] for each in weights) == reference.num_parameters()
    printed, _ = command("plan", file, "--json", "--n-positions", 32)
    assert "s4" in printed


def test_what_is_stored_must_be_a_matrix_of_the_model():
    sizes = dict(model_type="llama", vocab_size=32, hidden_size=32, num_attention_heads=1, num_hidden_layers=1)
    for stored, said in (
        ({"attn.w.weight": {"plain": [0]}}, r"stored must be for matrices of the model, got attn\.w\.weight"),
        ({"attn.q.weight": {"s3/32, f16": [0]}}, r"must be stored as 'plain', or as in 's4/32, f16 with minima'"),
        ({"attn.q.weight": {"s8, f32 with minima": [0]}}, "must be stored as"),
        ({"attn.q.weight": {"s4, f32": [0]}}, "must be stored as"),
        ({"attn.q.weight": {"nf4, f32": [0]}}, "must be stored as"),
        ({"attn.q.weight": {"e2m1/31, bf16": [0]}}, "must be stored as"),
        ({"attn.q.weight": {"e2m1/32, f32 with minima": [0]}}, "must be stored as"),
        ({"attn.q.weight": {"s5/16, f16": [0]}}, "must be stored as"),
        ({"attn.q.weight": {"s6/24, f16": [0]}}, "must be stored as"),
        ({"attn.q.weight": {"s8, s8 x f16/256": [0]}}, "must be stored as"),
        ({"attn.q.weight": {"s4/32, s8 x f16/48": [0]}}, "must be stored as"),
        ({"attn.q.weight": {"f8e4m3fn/32, f32 with minima": [0]}}, "must be stored as"),
    ):
        config = NeuronConfig(quant=QuantizationConfig(stored=stored))
        with pytest.raises(ConfigError, match=said):
            LlamaForSampling(sizes, n_positions=16, neuron_config=config).cpu_compile()
    with pytest.raises(ConfigError, match="stored"):
        QuantizationConfig(stored={"attn.q.weight": "s8"})


# The most that the perplexity of the trained checkpoint may rise on held-out text.
TRAINED = dict(F16=1e-4, Q8_0=5e-4, Q5_1=0.005, Q5_0=0.01, Q4_1=0.03, Q4_0=0.035)


@pytest.mark.slow
@pytest.mark.parametrize("kind", TRAINED)
def test_perplexity_of_the_trained_checkpoint(kind, tmp_path):
    ids = AutoTokenizer.from_pretrained(TINY_KJV)((TINY_KJV / "heldout.txt").read_text(), verbose=False).input_ids
    write_gguf(tmp_path / "model.gguf", AutoModelForCausalLM.from_pretrained(TINY_KJV, dtype=torch.float32), kind)

    def loss(path):
        model = NeuronAutoModelForCausalLM.from_pretrained(path, n_positions=[512], context_length_estimate=512)
        model.to_neuron()
        pieces = [ids[first : first + 512] for first in range(0, len(ids) - 1, 511)]
        return -torch.cat([model.score([piece])[0, 1:] for piece in pieces]).mean()

    rise = torch.exp(loss(tmp_path / "model.gguf") - loss(TINY_KJV)) - 1
    print(f"perplexity over held-out text, {kind}: {rise:+.2%}")
    assert rise < TRAINED[kind]


QUESTIONS = """
What is the capital of France? Name three colors. Why is the sky blue? Write a haiku about the sea.
What is 12 times 12? Who wrote Hamlet? Translate 'good morning' to Spanish. What is a neuron?
Give me a recipe for pancakes. How far is the moon? What is photosynthesis? List the planets.
What does CPU mean? Explain gravity to a child. What is the largest ocean? Who was Einstein?
How do I boil an egg? What is Python? Tell me a joke. What is the speed of light?
"""


@pytest.mark.slow
def test_a_published_file_of_a_chat_model(chat_file, chat_model):
    """Greedy answers to 20 questions are those of Transformers with the file's numbers in f32."""
    tokenizer = AutoTokenizer.from_pretrained(chat_file.parent, gguf_file=chat_file.name)
    reference = AutoModelForCausalLM.from_pretrained(chat_model, dtype=torch.float32).eval()
    model = NeuronAutoModelForCausalLM.from_pretrained(chat_file, n_positions=256, context_length_estimate=64)
    model.to_neuron()
    assert model.metrics.held.weights < chat_file.stat().st_size
    for question in re.findall(r"\w[^.?]*[.?]", QUESTIONS):
        messages = [dict(role="user", content=question)]
        asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt").input_ids
        wanted = reference.generate(asked, max_new_tokens=64, do_sample=False, repetition_penalty=1.0)
        assert model.sample(asked, asked.shape[1] + 64, top_k=1)[:, : wanted.shape[1]].equal(wanted), question
