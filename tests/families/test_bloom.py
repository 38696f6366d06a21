"""BLOOM's logits against Transformers'."""

import json

import pytest
import torch
from transformers import BloomConfig
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from transformers_neuronx.bloom import weights
from transformers_neuronx.bloom.config import BloomConfig as OurConfig
from transformers_neuronx.bloom.model import BloomForSampling
from transformers_neuronx.errors import ConfigError
from transformers_neuronx.layers import alibi_slopes


def config(**changes):
    return BloomConfig(**dict(vocab_size=131, hidden_size=48, n_layer=2, n_head=6) | changes)


VARIANTS = {
    "plain": {},
    "a power of two of heads": dict(n_head=8),
    "one head": dict(n_head=1),
    "residuals after norms": dict(apply_residual_connection_post_layernorm=True),
    "epsilon": dict(layer_norm_epsilon=1e-2),
    "a head of its own": dict(tie_word_embeddings=False),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.few(2)
def test_logits_are_those_of_transformers(parity, variant):
    parity(BloomForSampling, config(**VARIANTS[variant]))


@pytest.mark.parametrize("degree", [2, 3, 8])
@pytest.mark.parametrize("heads", [3, 4])
def test_at_degrees_that_divide_nothing(parity, degree, heads):
    parity(BloomForSampling, config(n_head=heads), degree=degree)


@pytest.mark.parametrize("degree", [1, 2])
def test_in_bf16(parity, degree):
    parity(BloomForSampling, config(), degree=degree, amp="bf16")


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 6, 7, 8, 12, 40, 112])
def test_slopes_are_those_of_transformers(heads):
    biases = build_alibi_tensor(torch.ones(1, 2, dtype=torch.int64), heads, torch.float32)  # of positions 0 and 1
    torch.testing.assert_close(alibi_slopes(heads), biases[:, 0, 1], rtol=1e-6, atol=0)


@pytest.mark.parametrize("degree", [1, 4, 8])
def test_heads_of_zeros_have_slopes_of_zero(degree):
    table = weights.table(OurConfig.from_hf(attributes()))
    (row,) = (row for row in table if row.name == "attn.alibi")
    slopes = torch.cat(row.split.cut(row.value(), degree))
    assert torch.equal(slopes[:6], alibi_slopes(6))
    assert len(slopes) == {1: 6, 4: 8, 8: 8}[degree]
    assert not slopes[6:].any()


def attributes(**changes):
    return json.loads(config().to_json_string(use_diff=False)) | changes


def test_the_names_that_published_checkpoints_use():
    names = dict(hidden_size="n_embed", n_layer="num_hidden_layers", n_head="num_attention_heads")
    published = {names.get(name, name): value for name, value in attributes(offset_alibi=100, n_inner=None).items()}
    assert OurConfig.from_hf(published) == OurConfig.from_hf(attributes())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(alibi=False), "not supported: alibi=False"),
        (dict(vocab_size=None), "bloom configuration: Validation error for field 'vocab_size'"),
    ],
)
def test_what_is_not_known_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        OurConfig.from_hf(attributes(**changes))
