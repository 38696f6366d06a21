"""Sparse attention: the tokens and logits of Transformers' models under the same masks."""

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from transformers_neuronx import NeuronConfig, SparseAttnConfig
from transformers_neuronx.errors import ConfigError
from transformers_neuronx.huggingface.auto import family_of
from transformers_neuronx.sparse_attn_utils import (
    BlkSparseAttnConfig,
    SlidingWindowAttnConfig,
    build_dense_mask,
    build_sliding_window_mask,
    create_blk_mask,
)

LENGTH = 48
PATTERNS = {
    "window": SparseAttnConfig("window", True, SlidingWindowAttnConfig(5)),
    "blocks": SparseAttnConfig("blk_sparse", True, BlkSparseAttnConfig(4, 1, 3)),
    "random": SparseAttnConfig("blk_sparse", False, BlkSparseAttnConfig(8, 0, 1, 2)),
    "custom": SparseAttnConfig("custom", sparse_mask_dict={(64, 64): (torch.arange(64) % 3 != 1).expand(64, 64)}),
}
MODELS = {
    "gpt2": GPT2Config(vocab_size=97, n_positions=64, n_embd=32, n_layer=2, n_head=4),
    "llama": LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=MODELS)
def reference(request, tmp_path_factory):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODELS[request.param], attn_implementation="eager").eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    directory = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(directory)
    return model, directory


def masked(model, ids, seen):
    """Logits of Transformers' model whose tokens attend to `seen` pred[n, n]."""
    n = ids.shape[1]
    mask = torch.zeros(1, 1, n, n).masked_fill(~seen[:n, :n], torch.finfo(torch.float32).min)
    with torch.no_grad():
        return model(ids, attention_mask=mask.expand(len(ids), 1, n, n)).logits


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.few(3)
def test_logits_and_tokens_are_those_of_a_masked_model(name, reference):
    model, directory = reference
    pattern = PATTERNS[name]
    seen = pattern.create_sparse_mask(LENGTH, LENGTH)
    options = dict(
        n_positions=LENGTH, context_length_estimate=16, tp_degree=2, neuron_config=NeuronConfig(sparse_attn=pattern)
    )
    neuron = family_of(model.config.model_type).from_pretrained(directory, **options)
    neuron.to_neuron()
    ids = torch.randint(0, 97, (1, 21), generator=torch.manual_seed(1))
    wanted = masked(model, ids, seen)
    got = neuron(ids, output_all_logits=True)
    assert (got - wanted).abs().max() < 1e-5 * wanted.abs().max()
    dense = torch.tril(torch.ones(LENGTH, LENGTH, dtype=torch.bool))
    assert (masked(model, ids, dense) - wanted).abs().max() > 1e-3, "the pattern changes nothing"
    row = ids
    while row.shape[1] < 34:
        row = torch.cat([row, masked(model, row, seen)[:, -1].argmax(1, keepdim=True)], 1)
    assert torch.equal(neuron.sample(ids, 34, top_k=1, eos_token_override=-1), row)


@pytest.mark.compiled_ahead
@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.few(2)
def test_an_artifact_keeps_it(name, reference, tmp_path):
    model, directory = reference
    kind = family_of(model.config.model_type)
    options = dict(n_positions=LENGTH, neuron_config=NeuronConfig(sparse_attn=PATTERNS[name]))
    neuron = kind.from_pretrained(directory, **options)
    neuron.to_neuron()
    neuron.save(tmp_path, sharded_weights=True)
    again = kind.from_pretrained(tmp_path)
    again.to_neuron()
    ids = torch.arange(30)[None]
    assert torch.equal(again(ids), neuron(ids))
    with pytest.raises(ConfigError, match="sparse"):
        kind.from_pretrained(directory, n_positions=LENGTH).load(tmp_path)


def test_patterns():
    blocks = create_blk_mask(4, 4, 1, 1)
    assert blocks.int().tolist() == [[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]]
    assert create_blk_mask(3, 3, 0, 3, causal=True).int().tolist() == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    assert create_blk_mask(5, 5, 0, 0, 2).sum(1).tolist() == [2] * 5
    assert build_dense_mask(3, 4, blocks[:2, :2], 2, causal=True).int().tolist() == [
        [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]
    ]  # fmt: skip
    assert build_sliding_window_mask(3, 3, 1).int().tolist() == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    for pattern in PATTERNS.values():
        assert pattern.pattern(40).config().pattern(40) == pattern.pattern(40)
        assert torch.equal(pattern.create_sparse_mask(1, 40), pattern.create_sparse_mask(40, 40)[-1:])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(attn_type="dense"), "attn_type must be one of blk_sparse, window, custom, got 'dense'"),
        (dict(), "sparse_attn_config must be a BlkSparseAttnConfig, got None"),
        (dict(attn_type="window", sparse_attn_config=BlkSparseAttnConfig()), "must be a SlidingWindowAttnConfig"),
        (dict(attn_type="custom", same_mask_per_layer=False), "same_mask_per_layer must be True"),
    ],
)
def test_what_is_no_pattern(options, message):
    with pytest.raises(ConfigError, match=message):
        SparseAttnConfig(**options)


def test_a_custom_mask_must_cover_the_model():
    with pytest.raises(ConfigError, match=r"needs a mask \[40, 40\] or larger, got \[\[8, 8\]\]"):
        SparseAttnConfig("custom", sparse_mask_dict={(8, 8): torch.ones(8, 8)}).pattern(40)
