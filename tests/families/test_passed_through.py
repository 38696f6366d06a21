"""Checkpoints that are published in 8 bits: their numbers and scales reach the devices as they are.

Numbers of a matrix are drawn in less than their type's range, so that quantizing them again would change them.
"""

import json

import pytest
import torch
from eight_bits import store_in_eight_bits
from mutations import mutations_of
from parity import assert_close, prompts, randomized
from safetensors.torch import load_file, save_file
from test_every_family import tiny

from transformers_neuronx import NeuronAutoModelForCausalLM
from transformers_neuronx.config import NeuronConfig, QuantizationConfig
from transformers_neuronx.errors import CheckpointError, ConfigError

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "phi3", "mixtral")


def compressed(kind, strategy, **more):
    weights = dict(num_bits=8, type=kind, symmetric=True, strategy=strategy, dynamic=False) | more
    groups = dict(group_0=dict(targets=["Linear"], weights=weights, input_activations=None))
    which = f"{kind}-quantized"
    return dict(quant_method="compressed-tensors", format=which, config_groups=groups, ignore=["lm_head", "re:.*gate$"])


def torchao(kind, shared, **more):
    granularity = dict(_type=shared, _version=1, _data=more)
    kinds = dict(default=dict(_type=f"{kind}Config", _version=2, _data=dict(granularity=granularity)))
    return dict(quant_method="torchao", quant_type=kinds, modules_to_not_convert=["gate"])


def fp8(block):
    return dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=block)


# The quantization_config, the type, the outputs and inputs that share a scale, and the end of the scale's name.
FORMS = {
    "int8, an output": (compressed("int", "channel"), "int", (1, None), "_scale"),
    "int8, a matrix": (compressed("int", "tensor"), "int", (None, None), "_scale"),
    "int8, groups of 8": (compressed("int", "group", group_size=8), "int", (1, 8), "_scale"),
    "FP8, an output": (compressed("float", "channel"), "float", (1, None), "_scale"),
    "FP8, a matrix": (compressed("float", "tensor"), "float", (None, None), "_scale"),
    "FP8, blocks": (compressed("float", "block", block_structure=[16, 8]), "float", (16, 8), "_scale"),
    "FP8, blocks as in Qwen3": (fp8([16, 8]), "float", (16, 8), "_scale_inv"),
    "int8 of torchao": (torchao("Int8DynamicActivationInt8Weight", "PerRow", dim=-1), "int", (1, None), "torchao"),
    "int8 of torchao, groups": (torchao("Int8WeightOnly", "PerGroup", group_size=8), "int", (1, 8), "torchao"),
    "FP8 of torchao": (torchao("Float8WeightOnly", "PerTensor"), "float", (None, None), "torchao"),
    "FP8 of vLLM": (fp8(None), "float", (None, None), "_scale"),
}


def published(directory, family, form):
    """Write a checkpoint of a form. Return the model of Transformers with the same numbers in f32."""
    how, *parts = FORMS[form]
    reference = randomized(tiny(family))
    reference.save_pretrained(directory)
    reference = store_in_eight_bits(reference, directory, *parts)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | dict(quantization_config=how)))
    return reference


def loaded(directory, degree=1, quant=None):
    model = NeuronAutoModelForCausalLM.from_pretrained(
        directory, n_positions=32, context_length_estimate=16, tp_degree=degree, neuron_config=NeuronConfig(quant=quant)
    )
    model.to_neuron()
    return model


def logits(model):
    [ids] = prompts(model.config.vocab_size, [13])
    return model.forward(torch.tensor([ids]), output_all_logits=True)[0]


def expected(reference):
    [ids] = prompts(reference.config.vocab_size, [13])
    with torch.inference_mode():
        return reference(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.few(16)
def test_logits_are_those_of_the_numbers(family, form, tmp_path):
    reference = published(tmp_path, family, form)
    model = loaded(tmp_path)
    assert model.options.quant.quant_dtype == ("s8" if FORMS[form][1] == "int" else "f8e4m3fn")
    assert_close(logits(model), expected(reference))


@pytest.mark.parametrize("degree", [2, 3])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.few(4)
def test_over_several_devices(form, degree, tmp_path):
    reference = published(tmp_path, "qwen3", form)
    assert_close(logits(loaded(tmp_path, degree)), expected(reference))


def test_other_options_quantize_again(tmp_path):
    reference = published(tmp_path, "llama", "int8, an output")
    model = loaded(tmp_path, quant=QuantizationConfig(quant_dtype="s4", group_size=8))
    difference = (logits(model) - expected(reference)).abs().max() / expected(reference).abs().max()
    assert 1e-3 < difference < 0.5


def test_a_form_that_is_not_read_is_refused(tmp_path):
    published(tmp_path, "llama", "int8, an output")
    config = json.loads((tmp_path / "config.json").read_text())
    weights = config["quantization_config"]["config_groups"]["group_0"]["weights"]
    for change in (dict(symmetric=False), dict(num_bits=4), dict(strategy="unheard")):
        how = compressed("int", "channel") | dict(config_groups=dict(group_0=dict(weights=weights | change)))
        (tmp_path / "config.json").write_text(json.dumps(config | dict(quantization_config=how)))
        with pytest.raises(ConfigError, match="is quantized"):
            NeuronAutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "how",
    [
        torchao("Int4WeightOnly", "PerGroup", group_size=32),
        torchao("Int8WeightOnly", "PerGroup", group_size=7),
        torchao("Int8WeightOnly", "PerBlock"),
        torchao("Int8WeightOnly", "PerRow") | dict(include_input_output_embeddings=True),
        torchao("Int8WeightOnly", "PerRow") | dict(quant_type="int8_weight_only"),
    ],
)
def test_a_form_of_torchao_that_is_not_read_is_refused(how, tmp_path):
    published(tmp_path, "llama", "int8 of torchao")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | dict(quantization_config=how)))
    with pytest.raises(ConfigError, match=r"is quantized \(torchao\)"):
        NeuronAutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("end", "change", "said"),
    [
        ("_zero_point", lambda part: part + 1, "expected symmetric numbers, found others than 0 in their zero_point"),
        ("_scale", lambda part: part[1:], "expected scales"),
        ("_scale", None, "its scales are missing"),
        ("_qdata", torch.Tensor.float, "expected a matrix of s8, as config.json says, got float32"),
    ],
)
def test_parts_of_torchao_that_do_not_fit_are_errors_that_name_them(end, change, said, tmp_path):
    published(tmp_path, "llama", "int8 of torchao")
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in tensors if name.endswith(f"o_proj._weight{end}"))
    part = tensors.pop(name)
    save_file(tensors | ({name: change(part).contiguous()} if change else {}), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=said) as error:
        loaded(tmp_path)
    assert name.replace(f"._weight{end}", ".weight") in str(error.value)


def test_mutations_are_read_as_something_or_refused(tmp_path):
    published(tmp_path, "llama", "int8 of torchao, groups")
    read, refused = mutations_of(tmp_path, "layers.0.self_attn.o_proj")
    assert min(read, refused) > 300


def test_parts_that_do_not_fit_are_errors_that_name_them(tmp_path):
    published(tmp_path, "llama", "FP8, blocks")
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in tensors if name.endswith("o_proj.weight"))
    for part, wrong, said in (
        (name, tensors[name].float(), "expected a matrix of f8e4m3fn, as config.json says, got float32"),
        (f"{name}_scale", torch.ones(3), "expected scales "),
    ):
        save_file(tensors | {part: wrong}, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=said) as error:
            loaded(tmp_path)
        assert name in str(error.value)


def test_an_artifact_keeps_the_numbers(tmp_path):
    reference = published(tmp_path / "checkpoint", "llama", "int8, groups of 8")
    model = loaded(tmp_path / "checkpoint")
    model.save(tmp_path / "artifact", sharded_weights=True)
    assert_close(logits(loaded(tmp_path / "artifact")), expected(reference))


def test_whole_matrices_that_the_configuration_does_not_name_are_told(tmp_path, caplog):
    """They are rounded as the others were, and the log says so. Of a checkpoint as it is described, it says nothing."""
    reference = published(tmp_path, "llama", "int8, an output")
    logits(loaded(tmp_path))
    assert not caplog.records
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[f"{name}_scale"]
    tensors[name] = reference.get_parameter(name).detach()
    save_file(tensors, tmp_path / "model.safetensors")
    got, wanted = logits(loaded(tmp_path)), expected(reference)
    assert [record.message.partition(" has ")[2] for record in caplog.records] == [
        "these matrices whole, and here they are rounded: model.layers.1.mlp.up_proj.weight"
    ]
    assert (got - wanted).abs().max() < 0.02 * wanted.abs().max()
