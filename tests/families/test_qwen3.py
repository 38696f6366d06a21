"""Qwen3's logits against Transformers'."""

import json

import pytest
from transformers import Qwen3Config

from transformers_neuronx.errors import ConfigError
from transformers_neuronx.qwen3.config import Qwen3Config as OurConfig
from transformers_neuronx.qwen3.model import Qwen3ForSampling


def config(**changes):
    return Qwen3Config(
        **dict(
            vocab_size=131,
            hidden_size=48,
            intermediate_size=72,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=2,
            max_position_embeddings=64,
            head_dim=16,
        )
        | changes
    )


VARIANTS = {
    "plain": {},
    "biases": dict(attention_bias=True),
    "a head_dim that is not its own": dict(head_dim=8),
    "all layers with windows": dict(use_sliding_window=True, sliding_window=5, max_window_layers=0),
    "windows switched off": dict(use_sliding_window=False, sliding_window=5, max_window_layers=1),
    "windows from the second layer on": dict(use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "windows beyond the last layer": dict(use_sliding_window=True, sliding_window=5, max_window_layers=2),
    "heads that all have keys": dict(num_key_value_heads=6),
    "a tied head": dict(tie_word_embeddings=True),
    "yarn": dict(
        rope_parameters=dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16)
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.few(2)
def test_logits_are_those_of_transformers(parity, variant):
    parity(Qwen3ForSampling, config(**VARIANTS[variant]))


@pytest.mark.parametrize(("degree", "kv_heads"), [(2, 2), (3, 2), (8, 2), (8, 6)])
def test_at_degrees_that_divide_nothing(parity, degree, kv_heads):
    parity(Qwen3ForSampling, config(num_key_value_heads=kv_heads, attention_bias=True), degree=degree)


@pytest.mark.parametrize("degree", [1, 2])
def test_in_bf16(parity, degree):
    parity(Qwen3ForSampling, config(), degree=degree, amp="bf16")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(hidden_act="mish"), "hidden_act='mish'; supported"),
        (dict(quantization_config=dict(bits=4)), r"is quantized \(an unnamed format, 4 bits\)"),
        (dict(layer_types=["chunked_attention"] * 2), "layer_types=.'chunked_attention.*; supported: 'full_attention'"),
    ],
)
def test_what_is_not_known_is_refused(changes, message):
    attributes = json.loads(config().to_json_string(use_diff=False)) | changes
    with pytest.raises(ConfigError, match=message):
        OurConfig.from_hf(attributes)
