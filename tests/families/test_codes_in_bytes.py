"""Checkpoints in MXFP4, NVFP4, nf4 and fp4: their codes and scales reach the devices exactly."""

import importlib
import json

import pytest
import torch
from codes_in_bytes import NUMBERS, store_in_codes
from mutations import mutations_of
from parity import assert_close, prompts, randomized
from safetensors.torch import load_file, save_file
from test_passed_through import expected, loaded, logits

from transformers_neuronx import NeuronAutoModelForCausalLM
from transformers_neuronx.errors import CheckpointError, ConfigError
from transformers_neuronx.weights import codes
from transformers_neuronx.weights.checkpoint import open_checkpoint
from transformers_neuronx.weights.packed import Packed
from transformers_neuronx.weights.quantization import Storage

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "phi3", "mixtral")


def compressed(kind, size, **more):
    strategy = "group" if kind == "mxfp4" else "tensor_group"
    weights = dict(num_bits=4, type="float", symmetric=True, strategy=strategy, group_size=size, dynamic=False) | more
    groups = dict(group_0=dict(targets=["Linear"], weights=weights))
    form = f"{kind}-pack-quantized"
    return dict(quant_method="compressed-tensors", format=form, config_groups=groups, ignore=["lm_head", "re:.*gate$"])


def bitsandbytes(kind, **more):
    how = dict(quant_method="bitsandbytes", load_in_4bit=True, load_in_8bit=False, bnb_4bit_quant_type=kind)
    return how | dict(bnb_4bit_quant_storage="uint8", llm_int8_skip_modules=["lm_head", "gate"]) | more


# The quantization_config, the layout of parts, and the inputs that share a scale.
FORMS = {
    "MXFP4": (compressed("mxfp4", 32), "mxfp4", 32),
    "NVFP4": (compressed("nvfp4", 16), "nvfp4", 16),
    "nf4": (bitsandbytes("nf4"), "nf4", 64),
    "nf4, nested": (bitsandbytes("nf4"), "nf4 nested", 64),
    "fp4, nested": (bitsandbytes("fp4"), "fp4 nested", 64),
}


def published(directory, family, form, **more):
    """Write a checkpoint of a form. Return the model of Transformers with the same numbers in f32."""
    how, *parts = FORMS[form]
    sizes = dict(hidden_size=64, intermediate_size=192, num_attention_heads=4)
    reference = randomized(importlib.import_module(f"test_{family}").config(**sizes))
    reference.save_pretrained(directory)
    reference = store_in_codes(reference, directory, *parts, **more)
    said_to_be(directory, how)
    return reference


def said_to_be(directory, how):
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | dict(quantization_config=how)))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.few(8)
def test_logits_are_those_of_the_numbers(family, form, tmp_path):
    reference = published(tmp_path, family, form)
    model = loaded(tmp_path)
    assert {text for plan in model.options.quant.stored.values() for text in plan if text != "plain"} == {
        dict(MXFP4="e2m1/32, bf16", NVFP4="e2m1/16, f32").get(form, f"{form[:3]}/64, f32")
    }
    assert_close(logits(model), expected(reference))


@pytest.mark.parametrize("degree", [2, 3])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.few(5)
def test_over_several_devices(family, form, degree, tmp_path):
    reference = published(tmp_path, family, form)
    assert_close(logits(loaded(tmp_path, degree)), expected(reference))


def test_an_artifact_keeps_the_numbers(tmp_path):
    reference = published(tmp_path / "checkpoint", "llama", "nf4, nested")
    loaded(tmp_path / "checkpoint").save(tmp_path / "artifact", sharded_weights=True)
    assert_close(logits(loaded(tmp_path / "artifact")), expected(reference))


def test_tokens_are_those_of_the_numbers(tmp_path):
    reference = published(tmp_path, "llama", "NVFP4")
    [ids] = prompts(reference.config.vocab_size, [9])
    wanted = reference.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert loaded(tmp_path).sample(torch.tensor([ids]), 17, top_k=1, eos_token_override=-1).equal(wanted)


def test_codes_stand_for_these_numbers():
    for name, numbers in NUMBERS.items():
        assert torch.equal(codes.numbers(torch.arange(16), name), numbers)
        assert torch.equal(codes.numbers(codes.nearest(numbers, name), name), numbers)
    pairs = torch.tensor([[0x21, 0xF0]], dtype=torch.uint8)
    assert codes.unpacked(pairs).tolist() == [[1, 2, 0, 15]]
    assert codes.unpacked(pairs, low_first=False).tolist() == [[2, 1, 15, 0]]


def test_other_numbers_become_the_nearest_codes():
    matrix, storage = torch.randn(5, 128, generator=torch.Generator().manual_seed(0)), Storage.of("nf4/64, f32")
    scales = storage.scales(matrix)
    assert torch.equal(scales, matrix.view(5, 2, 64).abs().amax(2))
    nearest = (matrix / scales.repeat_interleave(64, 1))[..., None].sub(NUMBERS["nf4"]).abs().argmin(-1)
    kept = Packed("nf4", nearest.to(torch.uint8), scales, 64)
    assert torch.equal(storage.values(matrix), storage.values(kept)) and torch.equal(scales, storage.scales(kept))


@pytest.mark.parametrize(
    "how",
    [
        compressed("mxfp4", 32, symmetric=False),
        compressed("mxfp4", 32, strategy="tensor_group"),
        compressed("nvfp4", None),
        compressed("nvfp4", 16, num_bits=8),
        bitsandbytes("nf4", load_in_4bit=False, load_in_8bit=True),
        bitsandbytes("int4"),
        bitsandbytes("nf4", bnb_4bit_quant_storage="bfloat16"),
    ],
)
def test_a_form_that_is_not_read_is_refused(how, tmp_path):
    published(tmp_path, "llama", "MXFP4")
    said_to_be(tmp_path, how)
    with pytest.raises(ConfigError, match="is quantized"):
        NeuronAutoModelForCausalLM.from_pretrained(tmp_path)


def state(**changes):
    """Change what a quant_state says; None takes it out."""

    def changed(part):
        told = json.loads(bytes(part.tolist())) | changes
        told = {name: value for name, value in told.items() if value is not None}
        return torch.tensor(list(json.dumps(told).encode()), dtype=torch.uint8)

    return changed


STATE = "o_proj.weight.quant_state.bitsandbytes__nf4"
DAMAGED = [
    ("MXFP4", "o_proj.weight_scale", lambda part: part | 255, "expected exponents as scales, found NaN"),
    ("MXFP4", "o_proj.weight_scale", lambda part: part[:, 1:], "expected scales uint8[64, 2], got uint8[64, 1]"),
    ("MXFP4", "o_proj.weight_scale", torch.Tensor.float, "expected scales uint8[64, 2], got float32[64, 2]"),
    ("MXFP4", "o_proj.weight_packed", torch.Tensor.int, "expected values uint8[?, ?], got int32[64, 32]"),
    ("MXFP4", "o_proj.weight_packed", lambda part: part[:, 1:], "expected inputs in groups of 32, got 62"),
    ("MXFP4", "o_proj.weight_scale", None, "its scales are missing"),
    ("NVFP4", "o_proj.weight_global_scale", None, "its divisor are missing"),
    ("NVFP4", "o_proj.weight_global_scale", lambda part: part * 0, "its scales are not finite"),
    ("NVFP4", "o_proj.weight_global_scale", lambda part: part.repeat(2), "expected one f32 that divides all scales"),
    ("nf4", STATE, None, "expected a quant_state of nf4, as config.json says"),
    ("nf4", STATE, state(quant_type="fp4"), "expected a quant_state of nf4 with sizes of a matrix and of blocks"),
    ("nf4", STATE, state(blocksize=None), "expected a quant_state of nf4 with sizes of a matrix and of blocks"),
    ("nf4", STATE, state(blocksize=32), "expected inputs in blocks of 64, or of a multiple, got 64 in blocks of 32"),
    ("nf4", STATE, state(blocksize=128), "expected inputs in blocks of 64, or of a multiple, got 64 in blocks of 128"),
    ("nf4", STATE, state(shape=[64, 65]), "expected bytes with 64 × 65 numbers, got uint8[2048, 1]"),
    ("nf4", STATE, lambda part: part[1:], "expected a quant_state of nf4"),
    (
        "nf4",
        "o_proj.weight.quant_map",
        lambda part: part.flip(0),
        "its codes stand for other numbers than those of nf4",
    ),
    ("nf4", "o_proj.weight.absmax", lambda part: part / 0, "its scales are not finite"),
    ("nf4", "o_proj.weight.absmax", lambda part: part[1:], "expected absmax float32[64], got float32[63]"),
    ("nf4, nested", STATE, state(nested_blocksize=None), "expected the nested_blocksize of its scales"),
    ("nf4, nested", "o_proj.weight.nested_absmax", lambda part: part.repeat(2), "expected nested_absmax float32[1]"),
    ("nf4, nested", "o_proj.weight.nested_quant_map", None, "its nested table are missing"),
]


@pytest.mark.parametrize(("form", "end", "change", "said"), DAMAGED)
def test_parts_that_do_not_fit_are_errors_that_name_them(form, end, change, said, tmp_path):
    published(tmp_path, "llama", form)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in sorted(tensors) if name.endswith(end))
    part = tensors.pop(name)
    save_file(tensors | ({name: change(part).contiguous()} if change else {}), tmp_path / "model.safetensors")
    matrix = name.partition("o_proj")[0] + "o_proj.weight"
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(tmp_path).packed(matrix)
    assert said in str(error.value) and str(error.value).startswith(f"{tmp_path}: {matrix}: ")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.few(2)
def test_mutations_are_read_as_something_or_refused(form, tmp_path):
    published(tmp_path, "llama", form)
    read, refused = mutations_of(tmp_path, "layers.0.self_attn.o_proj", lambda each: each.scales.isfinite().all())
    assert min(read, refused) > 300
