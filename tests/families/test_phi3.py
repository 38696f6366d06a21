"""Phi-3's logits against Transformers'."""

import json

import pytest
from transformers import Phi3Config

from transformers_neuronx.errors import ConfigError
from transformers_neuronx.phi3.config import Phi3Config as OurConfig
from transformers_neuronx.phi3.model import Phi3ForSampling


def config(**changes):
    return Phi3Config(
        **dict(
            vocab_size=131,
            hidden_size=48,
            intermediate_size=72,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=2,
            max_position_embeddings=64,
            pad_token_id=0,
        )
        | changes
    )


def longrope(pairs, **parameters):
    factors = [1.0 + 0.5 * i for i in range(pairs)]
    return dict(
        original_max_position_embeddings=16,
        rope_parameters=dict(
            rope_type="longrope", rope_theta=1e4, long_factor=factors, short_factor=factors[::-1], **parameters
        ),
    )


VARIANTS = {
    "plain": {},
    "a window": dict(sliding_window=5),
    "heads that all have keys": dict(num_key_value_heads=6),
    "a tied head": dict(tie_word_embeddings=True),
    "some features turned": dict(
        rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5),
    ),
    "longrope": longrope(4),
    "longrope with a factor": longrope(4, factor=2.0),
    "longrope of some features": longrope(2, partial_rotary_factor=0.5) | dict(sliding_window=9),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.few(2)
def test_logits_are_those_of_transformers(parity, variant):
    parity(Phi3ForSampling, config(**VARIANTS[variant]))


@pytest.mark.parametrize(("degree", "kv_heads"), [(2, 2), (3, 2), (8, 2), (8, 6)])
def test_at_degrees_that_divide_nothing(parity, degree, kv_heads):
    parity(Phi3ForSampling, config(num_key_value_heads=kv_heads), degree=degree)


@pytest.mark.parametrize("degree", [1, 2])
def test_in_bf16(parity, degree):
    parity(Phi3ForSampling, config(sliding_window=5), degree=degree, amp="bf16")


def test_configurations_from_before_rope_parameters():
    attributes = json.loads(config().to_json_string(use_diff=False)) | dict(
        rope_parameters=None,
        rope_theta=500.0,
        rope_scaling=dict(type="longrope", long_factor=[2.0, 3.0], short_factor=[1.0, 1.5]),
        original_max_position_embeddings=16,
        partial_rotary_factor=0.5,
        full_attn_mod=1,
        interpolate_factor=1,
    )
    rotary = OurConfig.from_hf(attributes).rotary
    assert (rotary.kind, rotary.dim, rotary.base) == ("longrope", 4, 500.0)
    assert (rotary.original_positions, rotary.stretch) == (16, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(hidden_act="mish"), "hidden_act='mish'; supported"),
        (dict(quantization_config=dict(bits=4)), r"is quantized \(an unnamed format, 4 bits\)"),
        (dict(attention_bias=True), "attention_bias=True; supported: False"),
        (dict(rope_parameters=dict(rope_type="spiral", rope_theta=1.0)), "got spiral"),
    ],
)
def test_what_is_not_known_is_refused(changes, message):
    attributes = json.loads(config().to_json_string(use_diff=False)) | changes
    with pytest.raises(ConfigError, match=message):
        OurConfig.from_hf(attributes)
