"""The text half of multimodal checkpoints: its logits are those of the whole model for text."""

import copy
import json
import logging

import pytest
import torch
from eight_bits import store_in_eight_bits
from multimodal import ATTRIBUTES, OTHERS
from parity import assert_close, continued, padded, prompts, randomized
from published import QUANTIZED
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from transformers_neuronx.cli.options import Source
from transformers_neuronx.config import NeuronConfig, completed
from transformers_neuronx.config.multimodal import MODELS, text_half
from transformers_neuronx.errors import CheckpointError, ConfigError
from transformers_neuronx.huggingface.auto import NeuronAutoModelForCausalLM, families
from transformers_neuronx.qwen3.model import Qwen3ForSampling
from transformers_neuronx.weights.adapters import open_adapter
from transformers_neuronx.weights.checkpoint import checkpoint_in_memory, checkpoint_of, open_checkpoint
from transformers_neuronx.weights.quantizing import quantize

SIZES = dict(batch_size=2, n_positions=[48], context_length_estimate=40)
WHOLE = ATTRIBUTES | OTHERS
ROWS, NEXT = prompts(120, [9, 40]), prompts(120, [3, 3], seed=1)  # beyond the length that rotations are stretched from


def reference(name):
    config = CONFIG_MAPPING[WHOLE[name]["model_type"]].from_dict(copy.deepcopy(WHOLE[name]))
    return randomized(config, AutoModelForImageTextToText)


def saved(name, directory):
    """Save a published configuration with random weights; return Transformers' model of it."""
    model = reference(name)
    model.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(WHOLE[name]))
    return model


def opened(source, **options):
    model = NeuronAutoModelForCausalLM.from_pretrained(source, **SIZES | options)
    model.to_neuron()
    return model


def logits(model):
    """Logits after all tokens of two rows, and after three more tokens of each."""
    ids, mask = padded(ROWS, "right")
    found = [model.forward(ids, attention_mask=mask, output_all_logits=True)[mask.bool()]]
    for column in range(3):
        mask = torch.cat([mask, torch.ones(2, 1, dtype=mask.dtype)], 1)
        found.append(model.forward([[row[column]] for row in NEXT], attention_mask=mask))
    return torch.cat(found)


def wanted(model):
    every = [continued(model, *row) for row in zip(ROWS, NEXT, strict=True)]
    steps = [torch.stack([of[column - 3] for of in every]) for column in range(3)]
    return torch.cat([*(of[:-3] for of in every), *steps])


def test_each_type_is_checked_here_once_its_family_exists():
    others = MODELS - ATTRIBUTES.keys()
    types = {CONFIG_MAPPING[name]().text_config.model_type.replace("_", "") for name in others}
    assert types.isdisjoint(families())
    assert ATTRIBUTES.keys() <= MODELS


@pytest.mark.parametrize("degree", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.few(3)
def test_its_logits_are_those_of_transformers(name, degree, tmp_path):
    model = saved(name, tmp_path)
    assert_close(logits(opened(tmp_path, tp_degree=degree)), wanted(model))


LAYOUTS = {
    "of version 5": {"language_model.model.": "model.language_model.", "language_model.lm_head.": "lm_head."}
    | {part: f"model.{part}" for part in ("vision_tower.", "multi_modal_projector.")},
    "of version 4": {},
    "of the bare model": {"language_model.model.": "language_model.", "language_model.lm_head.": None},
    "of Idefics": {"language_model.model.": "model.text_model.", "language_model.lm_head.": "lm_head.",
                   "vision_tower.": "model.vision_model.", "multi_modal_projector.": "model.connector."},
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_names_of_all_layouts(layout, tmp_path):
    reference("llava").save_pretrained(tmp_path)
    tensors, named = load_file(tmp_path / "model.safetensors"), {}
    for full, tensor in tensors.items():
        old = next((old for old in LAYOUTS[layout] if full.startswith(old)), "")
        if (new := LAYOUTS[layout].get(old, "")) is not None:
            named[new + full.removeprefix(old)] = tensor
    save_file(named, tmp_path / "model.safetensors")
    half = open_checkpoint(tmp_path)
    text = {full.removeprefix("language_model."): of for full, of in tensors.items() if full.startswith("language_")}
    assert half.names == {name for name in text if "bare" not in layout or name != "lm_head.weight"}
    assert all(torch.equal(half.read(name), text[name]) for name in half)
    assert sum(half.left_out.values()) == len(tensors) - len(text)


def test_one_line_says_what_is_left_out(tmp_path, caplog):
    saved("llava", tmp_path)
    with caplog.at_level(logging.WARNING, "transformers_neuronx"):
        NeuronAutoModelForCausalLM.from_pretrained(tmp_path)
    said = [record.getMessage() for record in caplog.records]
    parts = "multi_modal_projector (4 tensors), vision_tower (39 tensors)"
    assert said == [f"{tmp_path}: the text half of a multimodal model is loaded; left out: {parts}"]


def test_a_model_in_memory():
    whole = reference("qwen3_vl")
    model = Qwen3ForSampling(whole.config, **SIZES, neuron_config=NeuronConfig(tokens_per_dispatch=0))
    model.use_weights(checkpoint_of(whole))
    model.to_neuron()
    assert_close(logits(model), wanted(whole))


def test_an_artifact_and_its_own_weights(tmp_path):
    whole = saved("mistral3", tmp_path / "whole")
    opened(tmp_path / "whole").save(tmp_path / "artifact", sharded_weights=True)
    assert_close(logits(opened(tmp_path / "artifact")), wanted(whole))


def test_quantize_writes_a_checkpoint_of_the_text_half(tmp_path):
    saved("qwen3_vl", tmp_path / "whole")
    written = quantize(tmp_path / "whole", tmp_path / "small", "W8A16", windows=[ROWS[1]])
    assert written.matrices == 14
    assert json.loads((tmp_path / "small" / "config.json").read_text())["model_type"] == "qwen3"
    whole, small = (logits(opened(tmp_path / name)) for name in ("whole", "small"))
    assert 1e-4 < (whole - small).abs().max() / whole.abs().max() < 0.05


def test_weights_in_eight_bits_pass_through(tmp_path):
    model = store_in_eight_bits(saved("qwen3_vl", tmp_path), tmp_path, "float", (128, 128), "_scale_inv")
    attributes = ATTRIBUTES["qwen3_vl"] | dict(quantization_config=QUANTIZED["fp8"])
    (tmp_path / "config.json").write_text(json.dumps(attributes))
    half = opened(tmp_path)
    assert half.options.quant.quant_dtype == "f8e4m3fn"
    assert_close(logits(half), wanted(model))


def test_adapters_name_matrices_as_the_whole_model_does(tmp_path):
    start = "base_model.model.model.language_model.layers.0.self_attn.q_proj"
    parts = {"lora_A.weight": torch.ones(2, 48), "lora_B.weight": torch.ones(48, 2)}
    save_file({f"{start}.{part}": value for part, value in parts.items()}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(dict(peft_type="LORA", r=2, lora_alpha=2)))
    assert list(open_adapter(tmp_path).changes) == ["model.layers.0.self_attn.q_proj.weight"]


def test_commands(command, tmp_path):
    saved("qwen3_vl", tmp_path / "whole")
    printed, _ = command("check", tmp_path / "whole", "-n", 2)
    assert "The models agree" in printed
    assert Source(str(tmp_path / "whole" / "config.json")).cls is Qwen3ForSampling


def test_the_whole_model_decides():
    attributes = ATTRIBUTES["qwen3_vl"] | dict(
        tie_word_embeddings=False, eos_token_id=[2, 7], dtype="bfloat16",
        quantization_config=dict(
            quant_method="fp8",
            modules_to_not_convert=["lm_head", "model.language_model.layers.1.mlp.up_proj", "re:.*visual.*"],
        ),
    )  # fmt: skip
    half = text_half(attributes)
    assert half["model_type"] == "qwen3"
    assert half["tie_word_embeddings"] is False
    assert half["eos_token_id"] == [2, 7]
    assert half["dtype"] == "bfloat16"
    assert half["rope_parameters"].items() >= dict(rope_type="default", rope_theta=5000000).items()
    kept = ["lm_head", "model.layers.1.mlp.up_proj", "re:.*visual.*"]
    assert half["quantization_config"]["modules_to_not_convert"] == kept
    assert completed(attributes)["layer_types"] == ["full_attention"] * 2


def test_start_and_end_tokens_of_the_generation(tmp_path):
    saved("llava", tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(dict(eos_token_id=[5, 6])))
    assert NeuronAutoModelForCausalLM.from_pretrained(tmp_path).eos_token_ids == [5, 6]


def test_what_is_neither_text_nor_a_known_part_is_refused(tmp_path):
    saved("llava", tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"speech_tower.proj.weight": torch.ones(3)}, file)
    with pytest.raises(CheckpointError, match=r"has unexpected speech_tower\.proj\.weight$"):
        opened(tmp_path)


def test_a_tensor_under_two_names_is_refused():
    two = dict.fromkeys(["model.norm.weight", "model.language_model.norm.weight"], torch.ones(3))
    message = "it: has 'model.norm.weight' twice, as 'model.language_model.norm.weight' and as 'model.norm.weight'"
    with pytest.raises(CheckpointError, match=message):
        checkpoint_in_memory(two, "it")


def test_a_text_half_without_a_family_is_refused_by_its_own_type(tmp_path):
    text = dict(model_type="mamba", vocab_size=131)
    (tmp_path / "config.json").write_text(json.dumps(dict(model_type="llava", text_config=text)))
    with pytest.raises(ConfigError, match="model_type 'mamba' is not supported; expected one of"):
        NeuronAutoModelForCausalLM.from_pretrained(tmp_path)
