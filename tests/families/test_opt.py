"""OPT's logits against Transformers'."""

import json

import pytest
from parity import randomized
from transformers import OPTConfig

from transformers_neuronx.errors import ConfigError
from transformers_neuronx.opt import weights
from transformers_neuronx.opt.config import OPTConfig as OurConfig
from transformers_neuronx.opt.model import OPTForSampling
from transformers_neuronx.weights.checkpoint import open_checkpoint
from transformers_neuronx.weights.reading import resolve


def config(**changes):
    return OPTConfig(
        **dict(
            vocab_size=131,
            hidden_size=48,
            ffn_dim=72,
            num_hidden_layers=2,
            num_attention_heads=6,
            max_position_embeddings=48,
        )
        | changes
    )


VARIANTS = {
    "plain": {},
    "norms after": dict(do_layer_norm_before=False),
    "embeddings of another size": dict(word_embed_proj_dim=20),
    "as opt-350m": dict(do_layer_norm_before=False, word_embed_proj_dim=20),
    "no biases": dict(enable_bias=False),
    "no final norm": dict(_remove_final_layer_norm=True),
    "gelu": dict(activation_function="gelu"),
    "norms without weights": dict(layer_norm_elementwise_affine=False),
    "norms without weights, and after": dict(layer_norm_elementwise_affine=False, do_layer_norm_before=False),
    "a head of its own": dict(tie_word_embeddings=False, word_embed_proj_dim=20),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers(parity, variant):
    parity(OPTForSampling, config(**VARIANTS[variant]))


@pytest.mark.parametrize("degree", [2, 3, 8])
@pytest.mark.parametrize("variant", ["plain", "as opt-350m", "norms without weights"])
def test_at_degrees_that_divide_nothing(parity, variant, degree):
    parity(OPTForSampling, config(num_attention_heads=4, **VARIANTS[variant]), degree=degree)


@pytest.mark.parametrize("degree", [1, 2])
def test_in_bf16(parity, degree):
    parity(OPTForSampling, config(), degree=degree, amp="bf16")


def test_a_checkpoint_of_the_bare_model(tmp_path):
    randomized(config()).model.save_pretrained(tmp_path)
    ours = OurConfig.from_hf(attributes())
    checkpoint = open_checkpoint(tmp_path)
    assert "decoder.embed_tokens.weight" in checkpoint
    found = resolve(weights.table(ours), [""] * ours.n_layer, checkpoint, weights.PREFIX, weights.ignored(ours))
    assert found[1, "attn.out.bias"].source == "decoder.layers.1.self_attn.out_proj.bias"


def attributes(**changes):
    return json.loads(config().to_json_string(use_diff=False)) | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(activation_function="mish"), "activation_function='mish'; supported"),
        (dict(rope_theta=10000.0), "not supported: rope_theta=10000.0"),
    ],
)
def test_what_is_not_known_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        OurConfig.from_hf(attributes(**changes))
