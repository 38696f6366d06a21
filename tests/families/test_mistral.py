"""Mistral's logits against Transformers'."""

import json

import pytest
from transformers import MistralConfig

from transformers_neuronx.errors import ConfigError
from transformers_neuronx.mistral.config import MistralConfig as OurConfig
from transformers_neuronx.mistral.model import MistralForSampling


def config(**changes):
    return MistralConfig(
        **dict(
            vocab_size=131,
            hidden_size=48,
            intermediate_size=72,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=2,
            max_position_embeddings=64,
            sliding_window=None,
        )
        | changes
    )


VARIANTS = {
    "plain": {},
    "a window": dict(sliding_window=5),
    "a window of two": dict(sliding_window=2),
    "a window as long as a bucket": dict(sliding_window=24),
    "heads that all have keys": dict(num_key_value_heads=6),
    "a head_dim of its own": dict(head_dim=16, sliding_window=9),
    "a tied head": dict(tie_word_embeddings=True),
    "yarn": dict(
        rope_parameters=dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16)
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.few(2)
def test_logits_are_those_of_transformers(parity, variant):
    parity(MistralForSampling, config(**VARIANTS[variant]))


@pytest.mark.parametrize(("degree", "kv_heads"), [(2, 2), (3, 2), (8, 2), (8, 6)])
def test_at_degrees_that_divide_nothing(parity, degree, kv_heads):
    parity(MistralForSampling, config(num_key_value_heads=kv_heads, sliding_window=5), degree=degree)


@pytest.mark.parametrize("degree", [1, 2])
def test_in_bf16(parity, degree):
    parity(MistralForSampling, config(sliding_window=5), degree=degree, amp="bf16")


def test_a_window_that_is_left_out_is_that_of_transformers():
    attributes = json.loads(config().to_json_string(use_diff=False))
    assert OurConfig.from_hf(attributes).window is None
    del attributes["sliding_window"]
    assert OurConfig.from_hf(attributes).window == MistralConfig().sliding_window


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(hidden_act="mish"), "hidden_act='mish'; supported"),
        (dict(quantization_config=dict(bits=4)), r"is quantized \(an unnamed format, 4 bits\)"),
        (dict(layer_types=["full_attention"] * 2), "not supported: layer_types"),
    ],
)
def test_what_is_not_known_is_refused(changes, message):
    attributes = json.loads(config().to_json_string(use_diff=False)) | changes
    with pytest.raises(ConfigError, match=message):
        OurConfig.from_hf(attributes)
