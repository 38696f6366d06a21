"""GPT-J's logits against Transformers'."""

import json

import pytest
import torch
from parity import assert_close, continued, prompts, randomized
from safetensors.torch import load_file, save_file
from transformers import GPTJConfig

from transformers_neuronx.errors import ConfigError
from transformers_neuronx.gptj.config import GPTJConfig as OurConfig
from transformers_neuronx.gptj.model import GPTJForSampling


def config(**changes):
    return GPTJConfig(
        **dict(
            vocab_size=131,
            n_embd=80,
            n_layer=2,
            n_head=5,
            n_inner=72,
            rotary_dim=4,
            n_positions=64,
            bos_token_id=0,
            eos_token_id=1,
        )
        | changes
    )


VARIANTS = {
    "plain": {},
    "more features turned": dict(rotary_dim=10),
    "whole heads turned": dict(rotary_dim=16),
    "a feed-forward of four times the size": dict(n_inner=None),
    "gelu": dict(activation_function="gelu"),
    "eps": dict(layer_norm_epsilon=0.1),
    "a tied head": dict(tie_word_embeddings=True),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers(parity, variant):
    parity(GPTJForSampling, config(**VARIANTS[variant]))


@pytest.mark.parametrize(("degree", "tied"), [(2, False), (2, True), (3, False), (8, False)])
def test_at_degrees_that_divide_nothing(parity, degree, tied):
    parity(GPTJForSampling, config(tie_word_embeddings=tied), degree=degree)


@pytest.mark.parametrize("degree", [1, 2])
def test_in_bf16(parity, degree):
    parity(GPTJForSampling, config(), degree=degree, amp="bf16")


def test_an_older_checkpoint_with_its_causal_masks(tmp_path):
    reference = randomized(config())
    reference.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["transformer.h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
    tensors["transformer.h.0.attn.masked_bias"] = torch.tensor(-1e9)
    save_file(tensors, tmp_path / "model.safetensors")
    model = GPTJForSampling.from_pretrained(tmp_path, n_positions=24)
    model.to_neuron()
    [row] = prompts(131, [13])
    assert_close(model.forward([row]), continued(reference, row, [])[-1:])


def attributes(**changes):
    return json.loads(config().to_json_string(use_diff=False)) | changes


def test_a_rotary_dim_that_is_left_out_is_that_of_transformers():
    given = attributes(n_embd=640)
    del given["rotary_dim"]
    assert OurConfig.from_hf(given).rotary.dim == GPTJConfig().rotary_dim


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(scale_attn_weights=False), "scale_attn_weights=False; supported: True"),
        (dict(activation_function="mish"), "activation_function='mish'; supported"),
        (dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=2.0)), "not supported: rope_parameters"),
    ],
)
def test_what_is_not_known_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        OurConfig.from_hf(attributes(**changes))
