"""Calls over a cache of blocks, as programs for the original make them, on the trained model."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from blocks import Caller, batching, schedule
from recurrent import RecurrentForSampling, checkpoint
from transformers import AutoModelForCausalLM, T5Config

from transformers_neuronx import Engine, SamplingParams
from transformers_neuronx.config import (
    ContinuousBatchingConfig,
    GenerationConfig,
    KVCacheQuantizationConfig,
    NeuronConfig,
)
from transformers_neuronx.config.sparse_attention import BlkSparseAttnConfig, SlidingWindowAttnConfig, SparseAttnConfig
from transformers_neuronx.errors import ConfigError, InputError
from transformers_neuronx.gpt2.model import GPT2ForSampling
from transformers_neuronx.runtimes.neuron import NeuronRuntime
from transformers_neuronx.runtimes.xla import XlaRuntime
from transformers_neuronx.t5.model import T5ForSampling

pytestmark = pytest.mark.compiled_ahead

TINY_KJV = Path(__file__).parents[2] / "examples" / "tiny-kjv"
LENGTHS = [60, 33, 47, 5, 18]
ROWS = [torch.randint(3, 1000, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in LENGTHS]


def loaded(size=16, count=24, config=None, **options):
    config = config or batching(size, count)
    options = dict(n_positions=[64], context_length_estimate=16) | options
    model = GPT2ForSampling.from_pretrained(TINY_KJV, neuron_config=config, **options)
    model.to_neuron()
    return model


@pytest.fixture(scope="module")
def model():
    return loaded()


@pytest.fixture(scope="module")
def wants():
    """Logits of Transformers after each token of each row."""
    reference = AutoModelForCausalLM.from_pretrained(TINY_KJV)
    with torch.inference_mode():
        return [reference(torch.tensor([row])).logits[0] for row in ROWS]


def close(got, want, most=1e-4):
    torch.testing.assert_close(got, want, atol=most, rtol=0)


def run(model, lengths, wanted, seed=0, most=1e-4):
    """Run sequences of these lengths through blocks in chunks, and compare the logits of each call with `wanted`."""
    caller = Caller(model, seed)
    for parts in schedule(lengths, seed):
        got = caller({at: (ROWS[at], *part) for at, part in parts.items()}, padding=seed % 3)
        assert got.shape == (4, 1023) and not got[len(parts) :].any()
        close(got[: len(parts)], torch.stack([wanted[at][end - 1] for at, (_, end) in parts.items()]), most)


@pytest.mark.parametrize("seed", range(4))
def test_nothing_compiles_and_the_logits_are_those_of_transformers(model, wants, seed, monkeypatch):
    monkeypatch.setattr(model.decoder.store, "build", lambda module, *_: pytest.fail(f"{module.name} is compiled"))
    model.reset()
    run(model, LENGTHS, wants, seed)


def logits_of_slots(**switches):
    """Logits after each token of each row, by a model with slots."""
    model = loaded(config=NeuronConfig(**switches))
    return [model(torch.tensor([row]), output_all_logits=True)[0] for row in ROWS]


@pytest.mark.parametrize(
    ("switches", "most"),
    [
        (
            dict(kv_cache_quant=KVCacheQuantizationConfig()),
            2e-2,
        ),  # as slots differ with other chunks: keys round to integers
        (dict(sparse_attn=SparseAttnConfig("window", True, SlidingWindowAttnConfig(9))), 1e-4),
    ],
    ids=["int8", "window"],
)
def test_the_logits_are_those_of_slots(switches, most, wants):
    slots = logits_of_slots(**switches)
    assert (slots[0] - wants[0]).abs().max() > 2 * most, "the switch changes nothing"
    run(loaded(config=batching(32, 12, **switches)), LENGTHS, slots, most=most)


def test_all_logits_and_their_log_softmax(wants):
    model = loaded(config=batching(32, 12, output_all_logits=True, log_softmax_scores=True))
    assert all(key.logits == key.tokens for key in model.decoder.planned())
    logits, logs = Caller(model)({0: (ROWS[0], 0, 60), 1: (ROWS[1], 0, 33)})
    close(logits[0], torch.cat([wants[0], wants[1]]))
    close(logs, logits.log_softmax(-1))


def test_prompts_and_single_tokens_in_calls_of_their_own(wants):
    """As without chunked prefill: prompts side by side, whose blocks their slots tell; then a token of each."""
    model = loaded(config=batching(16, 24, chunked=False))
    caller, now = Caller(model), {0: 30, 2: 17, 3: 4}
    values, _ = caller.arguments({at: (ROWS[at], 0, end) for at, end in now.items()}, padding=2)
    metadata = SimpleNamespace(is_prompt=True, num_prefills=3, prompt_lens_tensor=torch.tensor(list(now.values())))
    got = model(*values, input_metadata=metadata)
    close(got, torch.stack([wants[at][end - 1] for at, end in now.items()]))
    for order in ([2, 0], [0], [0, 3, 2]):
        parts = {at: (ROWS[at], now[at], now[at] + 1) for at in order}
        (ids, positions, slots), named = caller.arguments(parts)
        named["input_metadata"].is_prompt = False
        got = model(ids.T, positions.T, slots, **named)
        close(got, torch.stack([wants[at][now[at]] for at in order]))
        now |= {at: now[at] + 1 for at in order}
    padded = [torch.cat([each, each[:1] * 0 + fill]) for each, fill in ((ids.T, 0), (positions.T, 0), (slots, -1))]
    named["input_metadata"].block_tables = torch.cat([named["input_metadata"].block_tables, torch.zeros(1, 3).long()])
    got = model(*padded, **named)
    close(got[:3], torch.stack([wants[at][now[at] - 1] for at in order]))
    assert got.shape == (4, 1023) and not got[3].any()


@pytest.mark.parametrize("together", [True, False])
def test_sequences_share_blocks(model, wants, together):
    """The second one begins with the blocks of the first, and may read them in the call that writes them."""
    model.reset()
    caller, other = Caller(model), [*ROWS[0][:32], *ROWS[1]]
    caller.grow(0, 40)
    caller.tables[1] = caller.tables[0][:2]
    first, second = {0: (ROWS[0], 0, 40)}, {1: (other, 32, 60)}
    calls = [second | first] if together else [first, second]
    got = torch.cat([caller(parts)[: len(parts)].flip(0) for parts in calls])
    reference = AutoModelForCausalLM.from_pretrained(TINY_KJV)
    close(got, torch.stack([wants[0][39], reference(torch.tensor([other[:60]])).logits[0, -1]]).detach())


def test_the_size_and_the_order_of_blocks_change_no_bit(model):
    """Blocks of 16 and of 32 positions have kernels; one model gives its blocks in another order."""
    callers = [Caller(model, 3), Caller(loaded(32, 12), 4), Caller(loaded(16, 64), 5)]
    model.reset()
    for parts in schedule(LENGTHS, 1):
        one, *others = (caller({at: (ROWS[at], *part) for at, part in parts.items()}) for caller in callers)
        assert all(torch.equal(one, other) for other in others)


def test_a_call_longer_than_every_program(model, wants):
    model.reset()
    parts = {0: (ROWS[0], 0, 60), 1: (ROWS[1], 0, 33), 2: (ROWS[2], 0, 47)}
    assert max(key.tokens for key in model.decoder.planned()) == 16
    close(Caller(model)(parts)[:3], torch.stack([wants[at][end - 1] for at, (*_, end) in parts.items()]))
    close(
        Caller(model)(parts, output_all_logits=True)[0], torch.cat([wants[at][:end] for at, (*_, end) in parts.items()])
    )


def test_a_pool_of_two_blocks_serves_one_sequence_after_the_other(wants):
    model = loaded(count=2)
    for at in (3, 1, 4):
        caller = Caller(model, at)
        for start in range(0, min(LENGTHS[at], 32), 8):
            end = min(start + 8, LENGTHS[at], 32)
            close(caller({at: (ROWS[at], start, end)})[0], wants[at][end - 1])


def test_the_cache_has_the_blocks_and_no_slots(model):
    positions, config = 24 * 16, model.config
    assert model.decoder.memory_use.caches == config.n_layer * 2 * positions * config.n_embd * 4


def test_an_artifact_keeps_the_blocks(model, wants, tmp_path, monkeypatch):
    model.save(tmp_path / "saved", sharded_weights=True)
    again = GPT2ForSampling.from_pretrained(tmp_path / "saved")
    assert again.options == model.options
    again.to_neuron()
    run(again, LENGTHS[:2], wants)


def test_an_engine_has_a_cache_of_its_own(model):
    prompt, params = ROWS[3], SamplingParams(max_tokens=6, temperature=0)
    with Engine(model, rows=2, step_tokens=16) as engine, Engine(loaded(config=NeuronConfig()), rows=2) as other:
        assert engine.submit(prompt, params).result() == other.submit(prompt, params).result()


def test_without_kernels_an_engine_needs_slots(model, monkeypatch):
    monkeypatch.setattr(model.decoder.programs, "reads_pages", False)
    with pytest.raises(ConfigError, match="an engine needs slots here, and the model has blocks: make it without"):
        Engine(model)


BAD = {
    "no metadata": (dict(input_metadata=None), "forward.. needs input_metadata with block_tables, got None"),
    "no tables": (dict(block_tables=None), "input_metadata needs block_tables, got none"),
    "no lengths": (dict(seq_lens_tensor=None), "input_metadata needs seq_lens_tensor, got none"),
    "tables of one": (dict(block_tables=[[1, 2]]), "must be of the same sequences, got 1, 2 and 2"),
    "flat tables": (dict(block_tables=[1, 2]), r"block_tables must be integers in 2 dimensions, got int64\[2\]"),
    "short tables": (dict(block_tables=[[1], [2]]), "must have blocks for 18 positions, got 1 for 16"),
    "unknown block": (
        dict(block_tables=[[24, 1], [2, 3]], start_ids=None),
        "blocks from 0 to 23 .* got 24 .* from 0 on",
    ),
    "negative block": (dict(block_tables=[[0, -1], [2, 3]], start_ids=None), "got -1 for positions from 16 on of seq"),
    "same block": (dict(block_tables=[[0, 1], [1, 3]], start_ids=None), "sequences 0 and 1 both write to block 1"),
    "more tokens": (dict(seq_lens_tensor=[18, 9]), r"\[1, 27\] where .* gives \[18, 9\] tokens|got \[1, 23\] where"),
    "fewer than none": (dict(context_lens=[0, 6]), r"gives \[18, -1\] tokens"),
    "no tokens": (dict(context_lens=[18, 5]), r"gives \[0, 0\] tokens"),
    "other positions": (
        dict(cache_ids=range(1, 24)),
        "cache_ids must agree .*: token 0 is at position 0 of sequence 0",
    ),
    "few positions": (dict(cache_ids=range(3)), "cache_ids must have a number for each of the 23 tokens .*, got 3"),
    "other slots": (dict(start_ids=range(1, 24)), r"start_ids must agree .* so slot \d+ with blocks of 16; got 1"),
    "few slots": (dict(start_ids=[3]), "start_ids must have a number for each of the 23 tokens of input_ids, got 1"),
    "two rows": (dict(input_ids=[[1] * 23] * 2, cache_ids=None, start_ids=None), r"must be \[1, n\].*, got \[2, 23\]"),
    "unknown token": (dict(input_ids=[[1023] * 23]), "input_ids must be ids from 0 to 1022, got 1023"),
    "a mask": (dict(attention_mask=[[1] * 23]), "attention_mask cannot say where tokens are in a cache of blocks"),
    "too long": (
        dict(context_lens=[60, 0], seq_lens_tensor=[78, 5]),
        "n_positions=64 is the longest .*, got 78 tokens",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_calls_are_refused(model, name):
    changes, message = BAD[name]
    caller = Caller(model)
    (ids, positions, slots), named = caller.arguments({0: (ROWS[0], 0, 18), 1: (ROWS[1], 0, 5)})
    arguments = dict(input_ids=ids, cache_ids=positions, start_ids=slots, **named)
    for key, value in changes.items():
        if key in ("input_ids", "cache_ids", "start_ids", "attention_mask", "input_metadata"):
            arguments[key] = list(value) if isinstance(value, range) else value
        else:
            setattr(arguments["input_metadata"], key, value)
    with pytest.raises(InputError, match=message):
        model(**arguments)


def test_more_sequences_than_max_num_seqs_are_refused(model):
    with pytest.raises(InputError, match="max_num_seqs=4 is the most sequences of a call, got 5"):
        Caller(model)({at: (ROWS[at], 0, 1) for at in range(5)})


def test_sequences_that_wait_for_each_other_are_refused(model):
    caller = Caller(model)
    caller.tables = {0: [1, 2], 1: [2, 1]}
    with pytest.raises(InputError, match=r"sequences \[0, 1\] read what others of them write"):
        caller({0: (ROWS[0], 16, 20), 1: (ROWS[1], 16, 20)})


def test_calls_without_chunks_say_what_they_want():
    model = loaded(config=batching(16, 24, chunked=False))
    with pytest.raises(InputError, match="start_ids must be the slots of a prompt's tokens, got None"):
        model([[5, 6]], input_metadata=SimpleNamespace(prompt_lens_tensor=[2]))
    with pytest.raises(InputError, match="cache_ids must be the positions of the tokens, got None"):
        model([[5]], input_metadata=SimpleNamespace(block_tables=[[0]]))
    with pytest.raises(InputError, match=r"one token of each of the 1 sequences of block_tables, got \[2, 1\]"):
        model([[5], [6]], input_metadata=SimpleNamespace(block_tables=[[0]]))
    with pytest.raises(InputError, match="a call needs tokens at positions of at least 0"):
        model([[5]], [[0]], [-1], input_metadata=SimpleNamespace(block_tables=[[0]]))
    with pytest.raises(InputError, match=r"one token of each of the 1 sequences of block_tables, got \[1, 0\]"):
        model([[]], input_metadata=SimpleNamespace(block_tables=[[0]]))


def test_calls_that_have_no_blocks_say_so(model):
    for call in (
        lambda: model.sample(torch.tensor([[5, 6]]), 8),
        lambda: model.score([[5, 6]]),
        lambda: model.speculative_forward(torch.tensor([[5]]), torch.tensor([[0]])),
        lambda: model.reorder_cache([0, 1, 2, 3]),
    ):
        with pytest.raises(InputError, match="cache is in blocks"):
            call()
    with pytest.raises(InputError, match=r"call init_cache_engine\(block_size, num_blocks\)"):
        loaded(config=NeuronConfig())([[5]], input_metadata=SimpleNamespace())


def test_what_has_no_blocks_is_refused_by_name(tmp_path, monkeypatch):
    sampling = batching(16, 8, on_device_generation=GenerationConfig())
    with pytest.raises(ConfigError, match="on_device_generation cannot sample from a cache of blocks: sample from"):
        loaded(config=sampling)
    pattern = batching(16, 8, sparse_attn=SparseAttnConfig("blk_sparse", True, BlkSparseAttnConfig(16, 1, 1)))
    with pytest.raises(ConfigError, match=r"sparse_attn without a window .*: make the model without init_cache_engine"):
        loaded(config=pattern)
    with pytest.raises(
        ConfigError, match=r"T5ForSampling has an encoder, .*: make the model without init_cache_engine"
    ):
        T5ForSampling(T5Config(vocab_size=32, d_model=16, num_layers=1), neuron_config=batching(16, 8))
    checkpoint(tmp_path)
    with pytest.raises(ConfigError, match=r"layers with states, which are not in blocks \(recurrent\): make"):
        RecurrentForSampling.from_pretrained(tmp_path, neuron_config=batching(16, 8))
    assert not NeuronRuntime.pages.fget(None)
    monkeypatch.setattr(XlaRuntime, "pages", False)
    with pytest.raises(ConfigError, match="has no attention over blocks yet: make the model without init_cache_engine"):
        loaded()


def test_the_configuration_says_what_a_cache_is():
    whole = ContinuousBatchingConfig(2, max_model_len=64, optimized_paged_attention=True)
    whole.init_cache_engine(block_size=64, num_blocks=2)
    slots = NeuronConfig(continuous_batching=whole)
    assert whole.blocks is None and not slots.paged_attention
    assert loaded(config=slots)([[5, 6]], [[0, 1]], [1], input_metadata=SimpleNamespace()).shape == (1, 1023)
    made = batching(16, 8)
    assert made.paged_attention and made.optimized_paged_attention and made.enable_chunked_prefill
    plain = NeuronConfig(continuous_batching=ContinuousBatchingConfig(2))
    assert not (plain.paged_attention or plain.optimized_paged_attention or plain.enable_chunked_prefill)
    with pytest.raises(ConfigError, match="enable_chunked_prefill needs optimized_paged_attention=True: pass both"):
        ContinuousBatchingConfig(2, enable_chunked_prefill=True)
    with pytest.raises(ConfigError, match="init_cache_engine needs max_model_len with optimized_paged_attention"):
        ContinuousBatchingConfig(2, optimized_paged_attention=True).init_cache_engine(16, 8)
    with pytest.raises(ConfigError, match="num_blocks must be a whole number of at least 1, or None, got 0"):
        made.continuous_batching.init_cache_engine(16, 0)
