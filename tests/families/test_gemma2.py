"""Gemma 2's logits against Transformers'."""

import json

import pytest
from transformers import Gemma2Config

from transformers_neuronx.errors import ConfigError
from transformers_neuronx.gemma2.config import Gemma2Config as OurConfig
from transformers_neuronx.gemma2.model import Gemma2ForSampling


def config(**changes):
    # With 24 in place of 128, scores are so sharp that Transformers' own f32 is 1e-5 away from f64.
    return Gemma2Config(
        **dict(
            vocab_size=131,
            hidden_size=48,
            intermediate_size=72,
            num_hidden_layers=4,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=16,
            query_pre_attn_scalar=128,
            sliding_window=5,
            max_position_embeddings=64,
            attn_logit_softcapping=3.0,
            final_logit_softcapping=5.0,
            attn_implementation="eager",
        )
        | changes
    )


VARIANTS = {
    "plain": {},
    "no soft caps": dict(attn_logit_softcapping=None, final_logit_softcapping=None),
    "a window longer than the sequences": dict(sliding_window=100),
    "windows everywhere": dict(layer_types=["sliding_attention"] * 4),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.few(2)
def test_logits_are_those_of_transformers(parity, variant):
    parity(Gemma2ForSampling, config(**VARIANTS[variant]))


@pytest.mark.parametrize("degree", [2, 3, 8])
def test_at_degrees_that_divide_nothing(parity, degree):
    parity(Gemma2ForSampling, config(), degree=degree)


@pytest.mark.parametrize("degree", [1, 2])
def test_in_bf16(parity, degree):
    parity(Gemma2ForSampling, config(), degree=degree, amp="bf16")


@pytest.mark.parametrize("unroll", [1, 2, 3])
def test_in_groups_of_layers_of_two_kinds(parity, unroll):
    parity(Gemma2ForSampling, config(), unroll=unroll, context_unroll=unroll)


def test_what_is_not_known_is_refused():
    attributes = json.loads(config().to_json_string(use_diff=False)) | dict(attention_bias=True)
    with pytest.raises(ConfigError, match="attention_bias=True; supported: False"):
        OurConfig.from_hf(attributes)
