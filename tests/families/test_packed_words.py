"""Checkpoints of compressed-tensors, GPTQ and AWQ: their numbers, scales and zeros reach the devices exactly."""

import json

import pytest
import torch
from four_bits import store_in_words
from parity import assert_close, prompts, randomized
from safetensors.torch import load_file, save_file
from test_every_family import tiny
from test_passed_through import expected, loaded, logits

from transformers_neuronx import NeuronAutoModelForCausalLM
from transformers_neuronx.config import QuantizationConfig
from transformers_neuronx.errors import CheckpointError, ConfigError

FAMILIES = ("gpt2", "llama", "qwen2", "qwen3", "mistral", "phi3", "mixtral")


def compressed(bits, symmetric, **more):
    weights = dict(num_bits=bits, type="int", symmetric=symmetric, strategy="group", group_size=8, dynamic=False) | more
    groups = dict(group_0=dict(targets=["Linear"], weights=weights))
    ignored = ["lm_head", "re:.*gate$"]
    return dict(quant_method="compressed-tensors", format="pack-quantized", config_groups=groups, ignore=ignored)


def gptq(**more):
    return dict(quant_method="gptq", bits=4, group_size=8, desc_act=False, sym=True) | more


AWQ = dict(quant_method="awq", bits=4, group_size=8, version="gemm", zero_point=True, modules_to_not_convert=["gate"])
# The quantization_config, the packing, bits, the inputs that share a scale, whether groups have zeros, and whether
# their inputs are shuffled.
FORMS = {
    "W4A16": (compressed(4, True), "compressed", 4, 8, False),
    "W4A16, asymmetric": (compressed(4, False), "compressed", 4, 8, True),
    "W8A16, an output": (compressed(8, True, strategy="channel", group_size=None), "compressed", 8, None, False),
    "W8A16, asymmetric": (compressed(8, False), "compressed", 8, 8, True),
    "GPTQ": (gptq(), "gptq", 4, 8, False),
    "GPTQ, asymmetric": (gptq(sym=False), "gptq", 4, 8, True),
    "GPTQ of its second version": (gptq(sym=False, checkpoint_format="gptq_v2"), "gptq_v2", 4, 8, True),
    "GPTQ of 8 bits": (gptq(bits=8), "gptq", 8, 8, False),
    "GPTQ with act-order": (gptq(desc_act=True), "gptq", 4, 8, False, True),
    "GPTQ with act-order, asymmetric": (gptq(desc_act=True, sym=False), "gptq", 4, 8, True, True),
    "GPTQ with act-order, a group of fewer": (
        gptq(desc_act=True, sym=False, group_size=16), "gptq", 4, 16, True, True,
    ),
    "GPTQ with act-order, of 8 bits": (gptq(desc_act=True, bits=8), "gptq", 8, 8, False, True),
    "W4A16, an output": (compressed(4, True, strategy="channel", group_size=None), "compressed", 4, None, False),
    "W4A16, an output, asymmetric": (compressed(4, False, strategy="channel"), "compressed", 4, None, True),
    "GPTQ, an output": (gptq(group_size=-1, desc_act=True), "gptq", 4, None, False),
    "GPTQ, an output, asymmetric": (gptq(group_size=-1, sym=False), "gptq", 4, None, True),
    "GPTQ of 8 bits, an output": (gptq(group_size=-1, bits=8), "gptq", 8, None, False),
    "AWQ, an output": (AWQ | dict(group_size=-1), "awq", 4, None, True),
    "W4A16 with act-order": (compressed(4, True, actorder="group"), "compressed", 4, 8, False, True),
    "AWQ": (AWQ, "awq", 4, 8, True),
    "AWQ, older names": (
        dict(quant_method="awq", w_bit=4, q_group_size=8, version="GEMM", modules_to_not_convert=["gate"]), "awq", 4, 8,
        True,
    ),
}  # fmt: skip


def published(directory, family, form, **more):
    """Write a checkpoint of a form. Return the model of Transformers with the same numbers in f32."""
    how, *parts = FORMS[form]
    reference = randomized(tiny(family))
    reference.save_pretrained(directory)
    reference = store_in_words(reference, directory, *parts, **more)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | dict(quantization_config=how)))
    return reference


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.few(14)
def test_logits_are_those_of_the_numbers(family, form, tmp_path):
    reference = published(tmp_path, family, form)
    model = loaded(tmp_path)
    assert model.options.quant.quant_dtype == ("s4" if FORMS[form][2] == 4 else "s8")
    assert_close(logits(model), expected(reference))


@pytest.mark.parametrize("degree", [2, 3])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.few(2)
def test_over_several_devices(form, degree, tmp_path):
    reference = published(tmp_path, "qwen3", form)
    assert_close(logits(loaded(tmp_path, degree)), expected(reference))


@pytest.mark.parametrize("degree", [2, 3])
@pytest.mark.parametrize("family", ["gpt2", "mixtral", "phi3"])
@pytest.mark.few(3)
def test_inputs_of_a_group_may_be_on_several_devices(family, degree, tmp_path):
    """With minima, padding at the end of a device's inputs must not count."""
    reference = published(tmp_path, family, "GPTQ with act-order, asymmetric")
    assert_close(logits(loaded(tmp_path, degree)), expected(reference))


def test_a_matrix_by_group_is_quantized_again_in_its_own_order(tmp_path):
    reference = published(tmp_path, "llama", "GPTQ with act-order")
    got = logits(loaded(tmp_path, quant=QuantizationConfig("s8")))
    difference = (got - expected(reference)).abs().max() / expected(reference).abs().max()
    assert 1e-5 < difference < 0.1


@pytest.mark.parametrize("form", ["AWQ", "GPTQ with act-order"])
def test_an_artifact_keeps_the_numbers(form, tmp_path):
    reference = published(tmp_path / "checkpoint", "llama", form)
    loaded(tmp_path / "checkpoint").save(tmp_path / "artifact", sharded_weights=True)
    assert_close(logits(loaded(tmp_path / "artifact")), expected(reference))


def test_tokens_are_those_of_the_numbers(tmp_path):
    reference = published(tmp_path, "llama", "GPTQ with act-order, asymmetric")
    [ids] = prompts(reference.config.vocab_size, [9])
    wanted = reference.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert loaded(tmp_path).sample(torch.tensor([ids]), 17, top_k=1, eos_token_override=-1).equal(wanted)


@pytest.mark.parametrize(
    "how",
    [
        gptq(bits=3),
        gptq(group_size=1),
        gptq(checkpoint_format="marlin"),
        AWQ | dict(version="gemv"),
        compressed(4, True, strategy="tensor", group_size=None),
        compressed(4, True, type="float"),
        compressed(4, True) | dict(format="int-quantized"),
    ],
)
def test_a_form_that_is_not_read_is_refused(how, tmp_path):
    published(tmp_path, "llama", "GPTQ")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | dict(quantization_config=how)))
    with pytest.raises(ConfigError, match="is quantized"):
        NeuronAutoModelForCausalLM.from_pretrained(tmp_path)


ORDER = (
    r"its inputs are not in the order of their groups \(act-order\), but config.json says that they are; set desc_act"
)


@pytest.mark.parametrize(
    ("form", "end", "change", "said"),
    [
        ("GPTQ", ".g_idx", lambda part: part.flip(0), ORDER),
        ("GPTQ with act-order", ".g_idx", lambda part: part // 2, "expected groups of 8 inputs each, got others"),
        ("GPTQ", ".qzeros", lambda part: part + 1, "config.json says that 8 stands for zero, and other numbers do"),
        ("GPTQ", ".scales", lambda part: part[:, 1:], "expected scales of groups of 8 inputs, got values, scales and"),
        ("GPTQ", ".qweight", torch.Tensor.float, "expected words, int32 of two dimensions, got float32"),
        ("AWQ", ".qzeros", lambda part: part[1:], "expected scales of groups of 8 inputs"),
        ("AWQ", ".qzeros", None, "its zeros are missing"),
        ("W4A16", ".weight_scale", None, "its scales are missing"),
        ("W4A16", ".weight_shape", lambda part: part * 100, "expected the sizes of a matrix in"),
    ],
)
def test_parts_that_do_not_fit_are_errors_that_name_them(form, end, change, said, tmp_path):
    published(tmp_path, "llama", form)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in tensors if name.endswith(f"o_proj{end}"))
    part = tensors.pop(name)
    save_file(tensors | ({name: change(part).contiguous()} if change else {}), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=said) as error:
        loaded(tmp_path)
    assert name.replace(end, ".weight") in str(error.value)
