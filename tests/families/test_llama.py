"""LLaMA's logits against Transformers'."""

import json

import pytest
from transformers import LlamaConfig

from transformers_neuronx.errors import ConfigError
from transformers_neuronx.llama.config import LlamaConfig as OurConfig
from transformers_neuronx.llama.model import LlamaForSampling


def config(**changes):
    return LlamaConfig(
        **dict(
            vocab_size=131,
            hidden_size=48,
            intermediate_size=72,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=2,
            max_position_embeddings=64,
        )
        | changes
    )


def rope(kind, **parameters):
    return dict(rope_parameters=dict(rope_type=kind, rope_theta=10000.0, **parameters))


LONG = [1.0 + 0.5 * i for i in range(4)]
VARIANTS = {
    "plain": {},
    "heads that all have keys": dict(num_key_value_heads=6),
    "one head of keys": dict(num_key_value_heads=1),
    "a head_dim of its own": dict(head_dim=16),
    "biases": dict(attention_bias=True, mlp_bias=True),
    "a tied head": dict(tie_word_embeddings=True),
    "gelu": dict(hidden_act="gelu"),
    "theta": dict(rope_parameters=dict(rope_type="default", rope_theta=500.0)),
    "linear": rope("linear", factor=4.0),
    "dynamic": rope("dynamic", factor=4.0) | dict(max_position_embeddings=16),
    "llama3": rope(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
    ),
    "yarn": rope("yarn", factor=4.0, original_max_position_embeddings=16),
    "yarn with all options": rope(
        "yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=16.0, beta_slow=2.0, mscale=0.9,
        mscale_all_dim=0.5, truncate=False,
    ),
    "longrope": rope(
        "longrope", factor=4.0, original_max_position_embeddings=16, long_factor=LONG, short_factor=LONG[::-1]
    ),
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.few(5)
def test_logits_are_those_of_transformers(parity, variant):
    parity(LlamaForSampling, config(**VARIANTS[variant]))


@pytest.mark.parametrize("degree", [2, 3, 8])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_at_degrees_that_divide_nothing(parity, degree, kv_heads):
    parity(LlamaForSampling, config(num_key_value_heads=kv_heads, attention_bias=True), degree=degree)


@pytest.mark.parametrize("degree", [1, 2])
def test_in_bf16(parity, degree):
    parity(LlamaForSampling, config(), degree=degree, amp="bf16")


def test_in_groups_of_layers(parity):
    parity(LlamaForSampling, config(num_hidden_layers=3), unroll=2, context_unroll=1, degree=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(rope_parameters=dict(rope_type="spiral", rope_theta=1.0)), "rope_type='spiral'; supported: default, lin"),
        (dict(hidden_act="mish"), "hidden_act='mish'; supported"),
        (dict(quantization_config=dict(bits=4)), r"is quantized \(an unnamed format, 4 bits\)"),
    ],
)
def test_what_is_not_known_is_refused(changes, message):
    attributes = json.loads(config().to_json_string(use_diff=False)) | changes
    with pytest.raises(ConfigError, match=message):
        OurConfig.from_hf(attributes)
