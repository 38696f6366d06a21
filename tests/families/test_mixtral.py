"""Mixtral's logits against Transformers'."""

import json

import pytest
from parity import assert_close, continued, prompts, randomized
from transformers import MixtralConfig

from transformers_neuronx.errors import ConfigError
from transformers_neuronx.mixtral.config import MixtralConfig as OurConfig
from transformers_neuronx.mixtral.model import MixtralForSampling
from transformers_neuronx.weights.checkpoint import save_pretrained_split


def config(**changes):
    return MixtralConfig(
        **dict(
            vocab_size=131,
            hidden_size=48,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=2,
            max_position_embeddings=64,
            num_local_experts=4,
        )
        | changes
    )


VARIANTS = {
    "plain": {},
    "one expert a token": dict(num_experts_per_tok=1),
    "all experts for every token": dict(num_local_experts=3, num_experts_per_tok=3),
    "many experts": dict(num_local_experts=9),
    "a window": dict(sliding_window=5),
    "a tied head": dict(tie_word_embeddings=True),
    "gelu": dict(hidden_act="gelu"),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.few(2)
def test_logits_are_those_of_transformers(parity, variant):
    parity(MixtralForSampling, config(**VARIANTS[variant]))


@pytest.mark.parametrize(("degree", "kv_heads"), [(2, 2), (3, 2), (8, 6)])
def test_at_degrees_that_divide_nothing(parity, degree, kv_heads):
    parity(MixtralForSampling, config(num_key_value_heads=kv_heads), degree=degree)


@pytest.mark.parametrize("degree", [1, 2])
def test_in_bf16(parity, degree):
    # Every expert for every token: otherwise rounding decides which of two almost equal experts a token goes to, here
    # and in Transformers, and the logits jump.
    parity(MixtralForSampling, config(num_local_experts=3, num_experts_per_tok=3), degree=degree, amp="bf16")


def test_experts_that_are_stacked_in_the_checkpoint(tmp_path):
    reference = randomized(config())
    save_pretrained_split(reference, tmp_path)
    model = MixtralForSampling.from_pretrained(tmp_path, n_positions=24)
    model.to_neuron()
    [row] = prompts(131, [13])
    assert_close(model.forward([row]), continued(reference, row, [])[-1:])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(hidden_act="mish"), "hidden_act='mish'; supported"),
        (dict(quantization_config=dict(bits=4)), r"is quantized \(an unnamed format, 4 bits\)"),
    ],
)
def test_what_is_not_known_is_refused(changes, message):
    attributes = json.loads(config().to_json_string(use_diff=False)) | changes
    with pytest.raises(ConfigError, match=message):
        OurConfig.from_hf(attributes)
