"""A cache whose positions are divided among devices: the logits and tokens of one that is copied, in less memory."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, MistralConfig

from transformers_neuronx import NeuronConfig, SparseAttnConfig
from transformers_neuronx.config import ContinuousBatchingConfig, KVCacheQuantizationConfig
from transformers_neuronx.huggingface.auto import family_of
from transformers_neuronx.sparse_attn_utils import BlkSparseAttnConfig

SIZES = dict(
    vocab_size=97, hidden_size=48, intermediate_size=48, num_hidden_layers=2, num_attention_heads=12,
    num_key_value_heads=2, max_position_embeddings=64, head_dim=8,
)  # fmt: skip
MODELS = {
    "llama": LlamaConfig(**SIZES),
    "mistral": MistralConfig(**SIZES, sliding_window=7),
    "gemma2": Gemma2Config(**SIZES, sliding_window=6, query_pre_attn_scalar=8, attn_logit_softcapping=5.0),
}
DEGREES = [4, pytest.param(6, marks=pytest.mark.slow)]  # two and three devices for each key head
SLOW = [("llama", 6), ("gemma2", 4)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """For each name: Transformers' model and its directory."""
    made = {}
    for name, config in MODELS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.2 * torch.randn_like(weight))
        model.save_pretrained(directory := tmp_path_factory.mktemp(name))
        made[name] = model, directory
    return made


def loaded(checkpoint, degree=4, **options):
    switches = NeuronConfig(shard_over_sequence=True, **options.pop("switches", {}))
    model, directory = checkpoint
    neuron = family_of(model.config.model_type).from_pretrained(
        directory, tp_degree=degree, neuron_config=switches, **dict(n_positions=46, context_length_estimate=8) | options
    )
    neuron.to_neuron()
    return neuron


@pytest.mark.parametrize(
    ("name", "degree"), [("mistral", 4), *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)]
)
def test_logits_are_those_of_transformers(name, degree, checkpoints):
    model, _ = checkpoints[name]
    neuron = loaded(checkpoints[name], degree, batch_size=2)
    ids = torch.randint(0, 97, (2, 27), generator=torch.manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        wanted = model(ids, attention_mask=mask, position_ids=positions).logits
    got = neuron(ids, attention_mask=mask, output_all_logits=True)
    assert (got - wanted)[mask.bool()].abs().max() < 1e-5 * wanted.abs().max()
    for length in (27, 28):  # single tokens, on one device and the next
        row = ids[:, :length]
        wanted = model.generate(
            row, attention_mask=mask[:, :length], do_sample=False, max_length=46, eos_token_id=None, pad_token_id=0
        )
        got = neuron.sample(row, 46, top_k=1, eos_token_override=-1, start_ids=torch.tensor([0, 5]))
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("degree", DEGREES)
def test_devices_hold_their_share(degree, checkpoints):
    neuron = loaded(checkpoints["llama"], degree)
    copied = family_of("llama").from_pretrained(checkpoints["llama"][1], n_positions=46, tp_degree=degree)
    copied.to_neuron()
    devices = degree // 2
    shares = -(-46 // devices) / copied.decoder.programs.page  # one page for all positions
    assert neuron.decoder.memory_use.caches == pytest.approx(copied.decoder.memory_use.caches * shares)
    assert [piece.shape for piece in neuron.decoder.caches[0].shards()] == [(1, -(-46 // devices), 8)] * degree


def test_without_copies_nothing_changes(checkpoints):
    for degree in (1, 2, 5):  # none; none; three key heads for five devices do not come out even
        assert loaded(checkpoints["llama"], degree).decoder.programs.cache.of_layers[0].spread is None


SWITCHES = {
    "s8": dict(kv_cache_quant=KVCacheQuantizationConfig(quant_dtype="s8")),
    "blocks": dict(sparse_attn=SparseAttnConfig("blk_sparse", True, BlkSparseAttnConfig(4, 1, 3))),
    "one by one": dict(tokens_per_dispatch=0),
}


@pytest.mark.parametrize(
    "name", ["s8", *(pytest.param(each, marks=pytest.mark.slow) for each in SWITCHES if each != "s8")]
)
@pytest.mark.slow
def test_with_other_switches_tokens_are_those_of_copies(name, checkpoints):
    got, wanted = (
        family_of("llama").from_pretrained(
            checkpoints["llama"][1],
            n_positions=[16, 46],
            tp_degree=4,
            neuron_config=NeuronConfig(shard_over_sequence=split, **SWITCHES[name]),
        )
        for split in (True, False)
    )
    got.to_neuron(), wanted.to_neuron()
    ids = torch.randint(0, 97, (1, 11), generator=torch.manual_seed(2))
    first, second = (model(ids).numpy() for model in (got, wanted))
    np.testing.assert_allclose(first, second, atol=1e-5 * np.abs(second).max())
    assert torch.equal(*(model.sample(ids, 46, top_k=1, eos_token_override=-1) for model in (got, wanted)))


def test_slots_of_continuous_batches(checkpoints):
    model, _ = checkpoints["llama"]
    neuron = loaded(checkpoints["llama"], switches=dict(continuous_batching=ContinuousBatchingConfig(max_num_seqs=3)))
    prompts = torch.randint(1, 97, (2, 19), generator=torch.manual_seed(3))
    columns = torch.arange(19)[None]
    neuron(prompts[:1], cache_ids=columns, start_ids=torch.tensor([2]))
    neuron(prompts[1:], cache_ids=columns, start_ids=torch.tensor([0]))
    ids = torch.tensor([[5], [9]])
    got = neuron(ids, cache_ids=torch.tensor([[19], [19]]), start_ids=torch.tensor([0, 2]))
    with torch.no_grad():
        wanted = model(torch.cat([prompts.flip(0), ids], 1)).logits[:, -1]
    assert (got.reshape(2, -1) - wanted).abs().max() < 1e-5 * wanted.abs().max()


@pytest.mark.compiled_ahead
def test_an_artifact_keeps_it(checkpoints, tmp_path):
    neuron = loaded(checkpoints["llama"])
    neuron.save(tmp_path / "artifact", sharded_weights=True)
    again = family_of("llama").from_pretrained(tmp_path / "artifact")
    assert again.neuron_config.shard_over_sequence
    again.to_neuron()
    ids = torch.arange(5, 14)[None]
    assert torch.equal(again(ids), neuron(ids))
