"""GPT-NeoX's logits against Transformers'."""

import json

import pytest
from parity import assert_close, continued, prompts, randomized
from safetensors.torch import load_file, save_file
from transformers import GPTNeoXConfig

from transformers_neuronx.errors import CheckpointError, ConfigError
from transformers_neuronx.gptneox.config import GPTNeoXConfig as OurConfig
from transformers_neuronx.gptneox.model import GPTNeoXForSampling


def config(**changes):
    return GPTNeoXConfig(
        **dict(
            vocab_size=131,
            hidden_size=80,
            intermediate_size=72,
            num_hidden_layers=2,
            num_attention_heads=5,
            max_position_embeddings=64,
            rotary_pct=0.25,
        )
        | changes
    )


def rope(kind, **parameters):
    return dict(rope_parameters=dict(rope_type=kind, rope_theta=10000.0, partial_rotary_factor=0.5, **parameters))


VARIANTS = {
    "plain": {},
    "attention before the feed-forward": dict(use_parallel_residual=False),
    "no biases in attention": dict(attention_bias=False),
    "a tied head": dict(tie_word_embeddings=True),
    "gelu_fast": dict(hidden_act="gelu_fast"),
    "eps": dict(layer_norm_eps=0.1),
    "whole heads turned": dict(rotary_pct=1.0),
    "a fraction that is rounded down": dict(rotary_pct=0.3),
    "theta": dict(rotary_emb_base=500),
    "linear": rope("linear", factor=4.0),
    "dynamic": rope("dynamic", factor=4.0) | dict(max_position_embeddings=16),
    "yarn": rope("yarn", factor=4.0, original_max_position_embeddings=16),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.few(2)
def test_logits_are_those_of_transformers(parity, variant):
    parity(GPTNeoXForSampling, config(**VARIANTS[variant]))


@pytest.mark.parametrize("degree", [2, 3, 8])
@pytest.mark.parametrize("parallel", [True, False])
def test_at_degrees_that_divide_nothing(parity, degree, parallel):
    parity(GPTNeoXForSampling, config(use_parallel_residual=parallel), degree=degree)


def test_a_tied_head_at_a_degree(parity):
    parity(GPTNeoXForSampling, config(tie_word_embeddings=True), degree=2)


@pytest.mark.parametrize("degree", [1, 2])
def test_in_bf16(parity, degree):
    parity(GPTNeoXForSampling, config(), degree=degree, amp="bf16")


class TestOlderCheckpoints:
    """Checkpoints written by Transformers 4, and by EleutherAI before it."""

    @pytest.fixture
    def saved(self, tmp_path):
        """A checkpoint, and a function that changes its tensors and runs the result."""
        reference = randomized(config(rotary_pct=0.5, rotary_emb_base=500))
        reference.save_pretrained(tmp_path)
        tensors, attributes = (
            load_file(tmp_path / "model.safetensors"),
            json.loads((tmp_path / "config.json").read_text()),
        )

        def check():
            save_file(tensors, tmp_path / "model.safetensors")
            (tmp_path / "config.json").write_text(json.dumps(attributes))
            model = GPTNeoXForSampling.from_pretrained(tmp_path, n_positions=24)
            model.to_neuron()
            [row] = prompts(131, [13])
            assert_close(model.forward([row]), continued(reference, row, [])[-1:])

        return tensors, attributes, check

    def test_their_rotary_attributes(self, saved):
        _, attributes, check = saved
        del attributes["rope_parameters"]
        attributes |= dict(rotary_pct=0.5, rotary_emb_base=500, rope_theta=500, partial_rotary_factor=0.5)
        check()

    def test_their_causal_masks_and_frequencies(self, saved):
        tensors, _, check = saved
        some = tensors["gpt_neox.final_layer_norm.bias"]
        for name in ("bias", "masked_bias", "rotary_emb.inv_freq"):
            tensors[f"gpt_neox.layers.1.attention.{name}"] = some.clone()
        check()

    def test_the_head_by_its_other_name(self, saved):
        tensors, _, check = saved
        tensors["lm_head.weight"] = tensors.pop("embed_out.weight")
        check()

    def test_a_head_that_is_missing_is_named_both_ways(self, saved):
        tensors, _, check = saved
        del tensors["embed_out.weight"]
        with pytest.raises(CheckpointError, match=r"lacks embed_out.weight\|lm_head.weight"):
            check()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(rope_parameters=dict(rope_type="spiral")), "rope_type='spiral'; supported: default, lin"),
        (dict(rope_parameters=dict(partial_rotary_factor=0.2)), "need an even number of a head's features, .*, got 3"),
        (dict(hidden_act="mish"), "hidden_act='mish'; supported"),
        (dict(sliding_window=64), "not supported: sliding_window=64"),
    ],
)
def test_what_is_not_known_is_refused(changes, message):
    attributes = json.loads(config().to_json_string(use_diff=False)) | changes
    with pytest.raises(ConfigError, match=message):
        OurConfig.from_hf(attributes)
