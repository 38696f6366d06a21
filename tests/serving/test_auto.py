"""A checkpoint's family is found by its model_type."""

import json
from pathlib import Path

import pytest
import torch

from transformers_neuronx.errors import ConfigError
from transformers_neuronx.gpt2.model import GPT2ForSampling
from transformers_neuronx.huggingface.auto import (
    NeuronAutoModelForCausalLM,
    NeuronAutoModelForSeq2SeqLM,
    families,
    family_of,
)
from transformers_neuronx.models.sampling import ForSampling

TINY_KJV = Path(__file__).parents[2] / "examples" / "tiny-kjv"


def test_the_bundled_checkpoint_is_a_gpt2():
    model = NeuronAutoModelForCausalLM.from_pretrained(TINY_KJV, n_positions=32)
    assert type(model) is GPT2ForSampling
    model.to_neuron()
    assert model(torch.tensor([[1, 2, 3]])).shape == (1, 1023)


@pytest.mark.parametrize("name", families())
def test_every_folder_with_a_model_and_every_file_of_families_is_a_family(name):
    cls = family_of(name)
    homes = [f"transformers_neuronx.{name}.model", f"transformers_neuronx.families.{name}"]
    assert issubclass(cls, ForSampling) and cls.__module__ in homes


def test_some_families_are_another_in_all_but_name():
    assert family_of("internlm3") is family_of("iquestcoder") is family_of("llama")


@pytest.mark.parametrize(
    ("auto", "model_type", "message"),
    [
        (NeuronAutoModelForCausalLM, "t5", "T5ForSampling has an encoder; use NeuronAutoModelForSeq2SeqLM"),
        (NeuronAutoModelForSeq2SeqLM, "gpt2", "GPT2ForSampling has no encoder; use NeuronAutoModelForCausalLM"),
    ],
)
def test_families_with_an_encoder_have_a_class_of_their_own(tmp_path, auto, model_type, message):
    (tmp_path / "config.json").write_text(json.dumps(dict(model_type=model_type)))
    with pytest.raises(ConfigError, match=message):
        auto.from_pretrained(tmp_path)


def test_an_unknown_family_is_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(dict(model_type="mamba")))
    with pytest.raises(ConfigError, match=r"model_type 'mamba' is not supported; expected one of .*gpt2"):
        NeuronAutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_configuration_without_a_model_type_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"has no model_type$"):
        NeuronAutoModelForCausalLM.from_pretrained(tmp_path)
