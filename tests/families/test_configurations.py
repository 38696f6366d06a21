"""Attributes that no family reads: logged if Transformers does not read them either, else refused."""

import copy
import itertools
import json
import logging
import re

import pytest
import torch
from parity import DECODERS
from test_every_family import tiny
from test_t5 import config as tiny_t5
from transformers import AutoModelForCausalLM

from transformers_neuronx.config import attributes as module
from transformers_neuronx.errors import ConfigError
from transformers_neuronx.huggingface.auto import NeuronAutoModelForCausalLM, families, family_of
from transformers_neuronx.layers import RotaryConfig

GPTQ = dict(quant_method="gptq", bits=4, group_size=128, desc_act=False)
FP8 = dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[128, 128])
PACKED = dict(
    quant_method="compressed-tensors",
    format="pack-quantized",
    config_groups=dict(group_0=dict(weights=dict(num_bits=4))),
)
NF4 = dict(load_in_4bit=True, load_in_8bit=False, bnb_4bit_quant_type="nf4")
MLX = dict(group_size=64, bits=4)

# By the checkpoints that have such attributes.
STRAYS = {
    "SmolLM2": ("llama", {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"kv": "q4"}}),
    "SmolLM2 as GGUF": ("llama", dict(_model_name_or_path="SmolLM2 135M Instruct", unk_token_id=0)),
    "unsloth's mirrors": ("qwen2", dict(unsloth_fixed=True, unsloth_version="2024.9")),
    "gemma-2-9b": ("gemma2", dict(sliding_window_size=4096)),
    "distilgpt2": ("gpt2", dict(_num_labels=1)),
    "vicuna-16k": ("llama", dict(max_sequence_length=16384)),
    "dolly-v2": ("gptneox", dict(custom_pipelines={"text-generation": dict(impl="instruct_pipeline.Pipeline")})),
    "galactica": ("opt", dict(learned_embeddings=True, scale_embeddings=False)),
    "fine-tunes": ("mistral", dict(_flash_attn_2_enabled=True, model_max_length=8192, tokenizer_padding_side="left")),
}


def attributes(family):
    config = tiny_t5() if family == "t5" else tiny(family)
    return json.loads(config.to_json_string(use_diff=False))


def read(family, **more):
    return family_of(family).family.read_config(attributes(family) | more)


@pytest.fixture
def said(monkeypatch, caplog):
    """The log's messages about attributes from now on."""
    monkeypatch.setattr(module, "_MENTIONED", set())
    with caplog.at_level(logging.WARNING):
        yield lambda: [record.getMessage() for record in caplog.records if record.name == module.__name__]


@pytest.mark.parametrize("of", STRAYS)
def test_what_transformers_does_not_read_either_is_mentioned_once(of, said):
    family, strays = STRAYS[of]
    assert read(family, **strays) == read(family)
    read(family, **strays)
    [line] = said()
    assert line.endswith(f"change nothing here either: {', '.join(sorted(strays))}.")


@pytest.mark.parametrize("family", families())
def test_its_own_configuration_says_nothing(family, said):
    read(family)
    assert said() == []


@pytest.mark.parametrize(
    ("family", "attribute", "value"),
    [
        ("llama", "attention_chunk_size", 8),  # masks depend on it
        ("llama", "sliding_window", 8),
        ("llama", "per_layer_config", {0: dict(hidden_act="gelu")}),
        ("llama", "layer_types", ["full_attention", "sliding_attention"]),
        ("mistral", "layer_types", ["full_attention", "sliding_attention"]),
        ("opt", "rope_theta", 8.0),
        ("t5", "tie_last_hidden_states", True),
    ],
)
def test_what_transformers_might_read_is_refused(family, attribute, value):
    with pytest.raises(ConfigError, match=f"has attributes that are not supported: {attribute}="):
        read(family, **{attribute: value})


@pytest.mark.parametrize("family", families())
def test_what_other_code_gives_a_meaning_is_refused(family):
    with pytest.raises(ConfigError, match=r"is_causal=False; supported: True"):
        read(family, is_causal=False)
    with pytest.raises(ConfigError, match=r"dual_chunk_attention_config=\{'chunk_size': 8\}; supported: None"):
        read(family, dual_chunk_attention_config=dict(chunk_size=8))
    assert read(family, is_causal=True, dual_chunk_attention_config=None) == read(family)


@pytest.mark.parametrize(
    ("quantized", "form"),
    [
        (dict(quantization_config=GPTQ | dict(bits=3)), "gptq, 3 bits"),
        (dict(quantization_config=dict(quant_method="awq", w_bit=4, version="gemv")), "awq, 4 bits"),
        (dict(quantization_config=FP8 | dict(fmt="e5m2")), "fp8, e5m2"),
        (dict(quantization_config=PACKED), "compressed-tensors, pack-quantized"),
        (dict(quantization_config=NF4), "bitsandbytes, 4 bits"),
        (dict(quantization_config=dict(quant_method="mxfp4")), "mxfp4"),
        (dict(quantization_config=dict(unheard_of=1)), "an unnamed format"),
        (dict(quantization_config={}), "an unnamed format"),
        (dict(quantization=MLX, quantization_config=MLX), "mlx, 4 bits"),
        (dict(quantization=MLX), "mlx, 4 bits"),
        (dict(compression_config=dict(format="pack-quantized")), "compressed-tensors, pack-quantized"),
    ],
)
def test_a_format_of_quantized_weights_is_named_in_one_line(quantized, form):
    with pytest.raises(ConfigError) as refused:
        read("llama", **quantized)
    message = str(refused.value)
    assert message.startswith(f"the llama checkpoint is quantized ({form}), and such weights cannot be read; ")
    assert "\n" not in message and len(message) < 220


ROTARY = [  # whose layers rotate alike
    name for name in DECODERS if isinstance(read(name), RotaryConfig) and "full_attention" not in read(name).rope
]
PER_LAYER = dict(full_attention=dict(rope_type="default", rope_theta=1e6), sliding_attention=dict(rope_theta=1e4))
ROPES = {
    "default": {},
    "linear": dict(factor=2.0),
    "dynamic": dict(factor=2.0),
    "yarn": dict(factor=2.0, original_max_position_embeddings=32),
    "llama3": dict(factor=2.0, original_max_position_embeddings=32, low_freq_factor=1.0, high_freq_factor=4.0),
    "longrope": dict(
        factor=2.0, original_max_position_embeddings=32, short_factor=[1.0] * 4, long_factor=[2.0] * 4
    ),
}  # fmt: skip
# Values that Transformers itself refuses.
NOT_TAKEN = [("mixtral", "longrope"), *(("phi3", kind) for kind in ("linear", "dynamic", "yarn", "llama3"))]


@pytest.mark.parametrize(
    ("family", "kind"), [pair for pair in itertools.product(ROTARY, ROPES) if pair not in NOT_TAKEN]
)
def test_what_a_type_of_rotation_does_not_have_is_refused(family, kind):
    """Ministral 3 scales queries by position: as Mistral, it would be wrong beyond the original length."""
    rope = ROPES[kind] | dict(rope_type=kind, rope_theta=1e4, partial_rotary_factor=1.0)
    read(family, rope_parameters=rope)
    read(family, rope_parameters=rope | dict(mrope_section=[2, 1, 1]))  # of no effect for text
    for name, value in dict(llama_4_scaling_beta=0.1, sections=[2, 1, 1]).items():
        message = rf"rope_parameters of type '{kind}' have keys that are not supported: {name}={re.escape(repr(value))}"
        with pytest.raises(ConfigError, match=message):
            read(family, rope_parameters=rope | {name: value})
    extra = next(name for name in ("low_freq_factor", "short_factor") if name not in rope)
    with pytest.raises(ConfigError, match=extra):
        read(family, rope_parameters=rope | {extra: 2.0})


@pytest.mark.parametrize("family", ["gemma2", "qwen2", "qwen3"])
def test_rotations_by_the_type_of_layer_are_refused(family):
    with pytest.raises(ConfigError, match=r"rope_parameters of type 'default' have .* full_attention=\{'rope_type'"):
        read(family, rope_parameters=PER_LAYER)


@pytest.mark.parametrize(
    ("spelling", "kind"),
    [
        (dict(rope_scaling=dict(type="linear", factor=2.0), rope_theta=5e3), "linear"),
        (dict(rope_scaling=dict(rope_type="linear", factor=2.0), rope_theta=5e3), "linear"),
        (dict(rope_parameters=dict(rope_type="linear", factor=2.0, rope_theta=5e3)), "linear"),
        (dict(rope_scaling=ROPES["yarn"] | dict(type="yarn", finetuned=True), rope_theta=5e3), "yarn"),
        (dict(rope_scaling=ROPES["llama3"] | dict(rope_type="llama3"), rope_theta=5e3), "llama3"),
        (dict(rope_scaling=None, rope_theta=5e3), "default"),
        (dict(rope_scaling=ROPES["linear"] | dict(type="linear", attention_factor=None), rope_theta=5e3), "linear"),
    ],
)
def test_older_names_of_rotations_are_read(spelling, kind):
    given = {name: value for name, value in attributes("llama").items() if name != "rope_parameters"}
    before = copy.deepcopy(given | spelling)
    rotary = family_of("llama").family.read_config(given | spelling).rotary
    assert (rotary.kind, rotary.base) == (kind, 5e3)
    assert given | spelling == before, "what is read was written to"


@pytest.mark.compiled_ahead
def test_artifacts_keep_what_was_left_aside(tmp_path, said):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny("gpt2")).save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(_num_labels=1)))
    model = NeuronAutoModelForCausalLM.from_pretrained(tmp_path / "model", n_positions=[16], context_length_estimate=8)
    model.to_neuron()
    model.save(tmp_path / "artifact", sharded_weights=True)
    loaded = NeuronAutoModelForCausalLM.from_pretrained(tmp_path / "artifact")
    loaded.to_neuron()
    assert torch.equal(loaded([[3, 1, 4]]), model([[3, 1, 4]]))
    assert len(said()) == 1 and json.loads((tmp_path / "artifact" / "config.json").read_text())["_num_labels"] == 1


def test_without_the_code_of_transformers_everything_is_refused(monkeypatch):
    config = attributes("llama")
    completed = family_of("llama").family.read_config(config)
    for found in (None, type("Spec", (), dict(origin="/nowhere/transformers/__init__.py"))):
        module._read_by_transformers.cache_clear()
        monkeypatch.setattr(module, "find_spec", lambda name, found=found: found)
        with pytest.raises(ConfigError, match="not supported: is_llama_config=True"):
            read("llama", is_llama_config=True)
        assert family_of("llama").family.read_config(config) == completed
    module._read_by_transformers.cache_clear()
