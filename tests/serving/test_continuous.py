"""Requests that share a few slots over time: each gets the tokens that it gets alone."""

from collections import deque
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from transformers_neuronx.config import ContinuousBatchingConfig, GenerationConfig, NeuronConfig
from transformers_neuronx.engine.keys import program_name
from transformers_neuronx.errors import ConfigError, InputError
from transformers_neuronx.gpt2.model import GPT2ForSampling
from transformers_neuronx.original.sampling_functions import select_tokens
from transformers_neuronx.runtimes.xla import XlaTensor

TINY_KJV = Path(__file__).parents[2] / "examples" / "tiny-kjv"
SLOTS = 4
OPTIONS = dict(n_positions=[96], context_length_estimate=[8, 24])


@pytest.fixture(scope="module", params=[1, 2], ids="tp{}".format)
def model(request):
    batching = ContinuousBatchingConfig(batch_size_for_shared_caches=SLOTS)
    model = GPT2ForSampling.from_pretrained(
        TINY_KJV, **OPTIONS, tp_degree=request.param, neuron_config=NeuronConfig(continuous_batching=batching)
    )
    model.to_neuron()
    return model


RULES = GenerationConfig(do_sample=True, dynamic=True, per_batch_line=True, top_k=[1] * SLOTS, global_top_k=64)


@pytest.fixture(scope="module")
def drawing_model():
    switches = NeuronConfig(continuous_batching=ContinuousBatchingConfig(SLOTS), on_device_generation=RULES)
    model = GPT2ForSampling.from_pretrained(TINY_KJV, **OPTIONS, neuron_config=switches)
    model.to_neuron()
    return model


@pytest.fixture
def drawing(drawing_model):
    """A model that returns tokens, sampled by rules per slot: greedy ones, until a test updates them."""
    drawing_model.update_generation_config(RULES)
    return drawing_model


@pytest.fixture(scope="module")
def requests():
    """Ten prompts, one of a single token and one longer than a window, each with its number of new tokens."""
    rows = torch.randint(1, 1000, (10, 60), generator=torch.Generator().manual_seed(0)).tolist()
    sizes = [(60, 30), (5, 4), (1, 9), (12, 14), (24, 1), (3, 20), (8, 7), (17, 12), (2, 25), (30, 6)]
    return [(row[:length], wanted) for row, (length, wanted) in zip(rows, sizes, strict=True)]


@pytest.fixture(scope="module")
def alone(requests):
    reference = AutoModelForCausalLM.from_pretrained(TINY_KJV)
    options = dict(do_sample=False, eos_token_id=None, pad_token_id=0)
    return [
        reference.generate(torch.tensor([prompt]), max_new_tokens=wanted, **options)[0, len(prompt) :].tolist()
        for prompt, wanted in requests
    ]


def step(model, sequences, slots):
    """Feed the new tokens of the sequences in these slots, in one call, and append a sampled token to each.

    A sequence is a pair: its tokens, and how many of them are in the cache.
    """
    fed = [sequences[slot] for slot in slots]
    width = max(len(tokens) - cached for tokens, cached in fed)
    ids, positions = torch.zeros(2, len(fed), width, dtype=torch.int64)
    for row, (tokens, cached) in enumerate(fed):
        ids[row, : len(tokens) - cached] = torch.tensor(tokens[cached:])
        positions[row, : len(tokens) - cached] = torch.arange(cached, len(tokens))
    out = model(ids, cache_ids=positions, start_ids=torch.tensor(slots))
    chosen = out if out.dtype == torch.int64 else select_tokens(out)
    assert chosen.shape == (len(slots), 1)
    for slot, (tokens, _), token in zip(slots, fed, chosen[:, 0].tolist(), strict=True):
        sequences[slot] = [*tokens, token], len(tokens)


def moving(model, monkeypatch):
    """Return a list that gets the bytes of each array that is moved to or from the devices from now on."""
    moved, runtime = [], model.decoder.runtime
    put = type(runtime).put

    def sent(self, shards, donate=False):
        moved.append(sum(shard.nbytes for shard in shards))
        return put(self, shards, donate)

    numpy = XlaTensor.numpy

    def received(self):
        array = numpy(self)
        moved.append(array.nbytes)
        return array

    monkeypatch.setattr(type(runtime), "put", sent)
    monkeypatch.setattr(XlaTensor, "numpy", received)
    return moved


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_the_loop_on_the_host_moves_tokens_only(monkeypatch, penalty):
    """As on Neuron: with `tokens_per_dispatch=0` each token takes a step and a sampling program; logits stay."""
    model = GPT2ForSampling.from_pretrained(TINY_KJV, **OPTIONS, neuron_config=NeuronConfig(tokens_per_dispatch=0))
    model.to_neuron()
    ids = torch.tensor([[5, 6, 7]])
    want = model.sample(ids, 64, top_k=1, repetition_penalty=penalty, eos_token_override=-1)
    moved = moving(model, monkeypatch)
    assert torch.equal(model.sample(ids, 64, top_k=1, repetition_penalty=penalty, eos_token_override=-1), want)
    assert sum(moved) - (penalty != 1) * 1023 < 61 * 300, sum(moved)  # the prompt's tokens are sent once


def serve(model, requests, apart):
    """Run all requests through the slots, the last free slot first, with another order of rows in every call.

    With `apart`, prompts have their own calls, as in serving stacks; otherwise they join those of running sequences.
    """
    waiting, free, made = deque(enumerate(requests)), list(range(SLOTS)), {}
    running, sequences, calls = {}, {}, 0
    while waiting or running:
        joining = []
        for _ in range(min(2, len(free), len(waiting))):
            number, (prompt, wanted) = waiting.popleft()
            running[slot := free.pop()] = number, wanted
            sequences[slot] = prompt, 0
            joining.append(slot)
        calls += 1
        slots = sorted(running, key=lambda slot: (slot * 3 + calls) % 5)
        if apart and joining:
            slots = joining
        elif calls % 3 == 0:
            slots = slots[: max(1, len(slots) - 1)]  # one has to wait
            slots += [slot for slot in joining if slot not in slots]
        step(model, sequences, slots)
        for slot in slots:
            number, wanted = running[slot]
            tokens = sequences[slot][0][len(requests[number][0]) :]
            if len(tokens) == wanted:
                made[number] = tokens
                del running[slot]
                free.insert(0, slot)
    return [made[number] for number in range(len(requests))]


@pytest.mark.parametrize("apart", [True, False], ids=["prompts apart", "prompts joining"])
def test_ten_requests_over_four_slots_get_what_each_gets_alone(model, requests, alone, apart):
    assert serve(model, requests, apart) == alone


def test_prompts_of_one_call_have_any_slots(model, requests, alone):
    sequences = {slot: (requests[number][0], 0) for slot, number in {3: 0, 1: 1, 0: 7}.items()}
    step(model, sequences, [3, 0, 1])
    step(model, sequences, [0, 3])
    step(model, sequences, [1, 3, 0])
    assert sequences[3][0][-3:] == alone[0][:3]
    assert sequences[1][0][-2:] == alone[1][:2]
    assert sequences[0][0][-3:] == alone[7][:3]


def test_a_slot_is_used_again_after_a_longer_sequence(model, requests, alone):
    for number in (0, 1, 2):
        sequences = {2: (requests[number][0], 0)}
        for _ in range(4):
            step(model, sequences, [2])
        assert sequences[2][0][-4:] == alone[number][:4]


def test_logits_of_all_tokens_stand_where_the_tokens_do(model, requests):
    prompt = requests[3][0]
    ids = torch.tensor([prompt, prompt[:5] + [0] * 7])
    positions = torch.tensor([[*range(12)], [*range(5)] + [0] * 7])
    every = model(ids, positions, torch.tensor([[2], [1]]), output_all_logits=True)
    torch.testing.assert_close(every[1, :5], every[0, :5])
    assert not every[1, 5:].any()
    torch.testing.assert_close(every[0, -1], model(ids[:1], positions[:1], [0])[0])


def test_sampling_a_batch_uses_the_first_slots_and_repeats_no_prompt(model, requests, alone):
    ids = torch.tensor([requests[3][0]])
    got = model.sample(ids, 24, top_k=1, eos_token_override=-1)
    assert got[0, 12:].tolist() == alone[3][:12]
    assert len(got) == 1
    with pytest.raises(InputError, match=r"start_ids must be the slots 0, 1, … in order for sample\(\), got \[2\]"):
        model.sample(ids, 24, cache_ids=[[*range(12)]], start_ids=[2])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (dict(start_ids=[0, 4]), r"start_ids must be distinct, .* below batch_size=4, got \[0, 4\]"),
        (dict(start_ids=[0, -1]), r"start_ids must be distinct, .* below batch_size=4, got \[0, -1\]"),
        (dict(start_ids=[2, 2]), r"start_ids must be distinct, .* below batch_size=4, got \[2, 2\]"),
        (dict(start_ids=[2]), r"input_ids, cache_ids and start_ids must have shapes .* \[2, 3\], \[2, 3\] and \[1\]"),
        (dict(cache_ids=[[0, 2, 3], [0, 1, 2]]), "cache_ids must be positions that count up"),
        (dict(cache_ids=[[0, 1, 2], [2, 1, 0]]), "cache_ids must be positions that count up"),
        (dict(cache_ids=[[0, 0, 1], [0, 1, 2]]), "cache_ids must be positions that count up"),  # padding on the left
        (dict(cache_ids=[[-1, 0, 1], [0, 1, 2]]), "cache_ids must be positions that count up"),
        (dict(cache_ids=[0, 1, 2]), r"cache_ids must be integers in 2 dimensions, got int64\[3\]"),
        (dict(cache_ids=None), r"start_ids names slots and needs cache_ids \[batch, n\]"),
        (dict(cache_ids=[[94, 95, 96], [0, 1, 2]]), "n_positions=96 is the longest sequence this model takes, got 97"),
        (dict(attention_mask=[[1, 1, 1], [1, 1, 1]]), "and so do start_ids and cache_ids: pass one or"),
    ],
)
def test_bad_slots_and_positions_are_refused_and_the_others_go_on(model, requests, alone, call, message):
    sequences = {1: (requests[0][0], 0)}
    step(model, sequences, [1])
    where = dict(cache_ids=[[0, 1, 2], [0, 1, 2]], start_ids=[0, 1]) | call
    with pytest.raises(InputError, match=message):
        model(torch.tensor([[5, 6, 7], [8, 9, 10]]), **where)
    step(model, sequences, [1])
    assert sequences[1][0][-2:] == alone[0][:2]


def test_contradictory_sizes_are_refused():
    def build(max_model_len=None, **options):
        batching = ContinuousBatchingConfig(SLOTS, max_model_len=max_model_len)
        return GPT2ForSampling.from_pretrained(
            TINY_KJV, **options, neuron_config=NeuronConfig(continuous_batching=batching)
        )

    assert build(batch_size=SLOTS).options.batch_size == SLOTS
    assert build().options.prompt_batch_size == 1
    assert build(max_model_len=96).options.buckets.longest == 96
    with pytest.raises(ConfigError, match="batch_size must be max_num_seqs=4, got 2"):
        build(batch_size=2)
    with pytest.raises(ConfigError, match="n_positions must be at least max_model_len=96, got 64"):
        build(max_model_len=96, n_positions=64)


@pytest.fixture
def dispatches(monkeypatch):
    """`dispatches(model)`: a list that gets the name of each program that the model runs from then on."""

    def watch(model):
        run = []

        def watched(name, executable):
            def call(*operands):
                run.append(name)
                return executable(*operands)

            return call

        built = {
            what: [(piece, watched(program_name(what, piece), executable)) for piece, executable in parts]
            for what, parts in model.decoder.store._built.items()
        }
        monkeypatch.setattr(model.decoder.store, "_built", built)
        return run

    return watch


def test_a_prompt_and_running_rows_are_one_dispatch(model, requests, alone, dispatches):
    sequences = {slot: (requests[number][0], 0) for slot, number in {0: 1, 1: 3, 2: 7}.items()}
    step(model, sequences, [0, 1, 2])
    run = dispatches(model)
    sequences[3] = requests[6][0], 0
    step(model, sequences, [2, 3, 0, 1])
    assert run == ["step_tokens24_sequences4_samples4"]
    for slot, number, count in ((0, 1, 2), (1, 3, 2), (2, 7, 2), (3, 6, 1)):
        assert sequences[slot][0][-count:] == alone[number][:count]


def test_the_last_token_of_a_prompt_goes_with_the_single_ones(model, requests, alone, dispatches):
    """Feed a prompt of 25 tokens, and one of another row, to programs that take 24."""
    prompt = (requests[0][0] * 2)[:25]
    want = model.forward(torch.tensor([prompt]), torch.arange(25)[None], [1])
    step(model, sequences := {0: (requests[1][0], 0)}, [0])
    run = dispatches(model)
    ids, positions = torch.zeros(2, 2, 25, dtype=torch.long)
    ids[0], positions[0] = torch.tensor(prompt), torch.arange(25)
    ids[1, 0], positions[1, 0] = sequences[0][0][-1], len(sequences[0][0]) - 1
    got = model.forward(ids, positions, [1, 0])
    assert run == ["step_tokens24_sequences4_samples4", "step_tokens4_sequences4_samples4"]
    torch.testing.assert_close(got[:1], want)
    assert got[1].argmax() == alone[1][1]


class TestTokensChosenOnTheDevice:
    def test_greedy_requests_get_what_each_gets_alone(self, drawing, requests, alone):
        assert serve(drawing, requests, apart=True) == alone

    def test_each_slot_has_rules_of_its_own_and_new_ones_need_no_program(self, drawing, requests, alone):
        before = set(drawing.decoder.store._built)
        rules = GenerationConfig(do_sample=True, top_k=[1, 50, 50, 50], temperature=[1.0, 3.0, 0.0, 3.0])
        drawing.update_generation_config(rules)
        rules.top_k[0] = 50  # without effect until the configuration is updated again
        drawn = set()
        for _ in range(4):
            sequences = dict.fromkeys((3, 0, 2, 1), (requests[3][0], 0))
            for _ in range(6):
                step(drawing, sequences, [2, 0, 3, 1])
            assert sequences[0][0][12:] == sequences[2][0][12:] == alone[3][:6]
            drawn |= {tuple(sequences[1][0]), tuple(sequences[3][0])}
        assert len(drawn) == 8
        assert set(drawing.decoder.store._built) == before

    def test_deterministic_draws_are_the_same_again(self, drawing, requests):
        drawing.update_generation_config(GenerationConfig(do_sample=True, temperature=3.0, deterministic=True))
        sequences = [{1: (requests[3][0], 0)} for _ in range(2)]
        for sequence in sequences:
            for _ in range(6):
                step(drawing, sequence, [1])
        assert sequences[0] == sequences[1]

    def test_a_draw_follows_from_its_own_seed_wherever_it_is_made(self, drawing, requests):
        """Run the same request with the same seed in each slot, alone and with others."""
        hot = dict(do_sample=True, top_k=0, temperature=2.0)
        made = {}
        for slots in ([0], [3], [2, 0], [1, 3, 2, 0]):
            seeds = [50 + slot for slot in range(SLOTS)]
            seeds[slots[-1]] = 7
            drawing.update_generation_config(GenerationConfig(**hot, seed=seeds))
            numbers = [*range(4, 4 + len(slots) - 1), 3]
            sequences = {slot: (requests[number][0], 0) for slot, number in zip(slots, numbers, strict=True)}
            for _ in range(8):
                step(drawing, sequences, slots)
            made[tuple(slots)] = sequences[slots[-1]][0][12:]
        assert len(set(map(tuple, made.values()))) == 1, made
        assert len(set(made[0,])) > 2

    def test_one_seed_keeps_rows_of_a_call_apart_by_their_place(self, drawing, requests):
        drawing.update_generation_config(GenerationConfig(do_sample=True, top_k=0, temperature=2.0, seed=7))
        made = {}
        for slots in ([0], [3, 1]):
            sequences = dict.fromkeys(slots, (requests[3][0], 0))
            for _ in range(8):
                step(drawing, sequences, slots)
            made |= {(len(slots), place): sequences[slot][0][12:] for place, slot in enumerate(slots)}
        assert made[1, 0] == made[2, 0] != made[2, 1]

    def test_neither_logits_nor_what_was_seen_go_by_the_host(self, drawing, requests, monkeypatch):
        """A step moves only the rows and the tokens: some hundred bytes for any vocabulary."""
        sequences = {slot: (requests[slot][0], 0) for slot in range(SLOTS)}
        step(drawing, sequences, [0, 1, 2, 3])
        moved = moving(drawing, monkeypatch)
        step(drawing, sequences, [0, 1, 2, 3])
        assert 0 < sum(moved) < 150 * SLOTS, moved

    def test_rules_for_another_number_of_slots_are_refused(self, drawing):
        with pytest.raises(InputError, match="top_k must be one value, or one for each of 4 rows, got 2"):
            drawing.update_generation_config(GenerationConfig(do_sample=True, top_k=[1, 2]))

    def test_a_model_that_returns_logits_has_no_rules_to_update(self, model):
        with pytest.raises(ConfigError, match="needs a model with on_device_generation in its NeuronConfig"):
            model.update_generation_config(GenerationConfig())
