"""One model with many callers: every call gets the tokens that it gets alone."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, LogitsProcessorList, StoppingCriteriaList

from transformers_neuronx.errors import InputError
from transformers_neuronx.gpt2.model import GPT2ForSampling
from transformers_neuronx.huggingface.adapter import HuggingFaceGenerationModelAdapter
from transformers_neuronx.speculation.drafts import SpeculativeGenerator

TINY_KJV = Path(__file__).parents[2] / "examples" / "tiny-kjv"
THREADS = 4
LONGEST = 48


@pytest.fixture(scope="module")
def model():
    model = GPT2ForSampling.from_pretrained(TINY_KJV, n_positions=LONGEST, context_length_estimate=16, batch_size=2)
    model.to_neuron()
    return model


@pytest.fixture(scope="module")
def adapter(model):
    return HuggingFaceGenerationModelAdapter(AutoConfig.from_pretrained(TINY_KJV), model)


def prompt(number):
    return torch.randint(1, 1000, (1 + number % 2, 4 + number % 7), generator=torch.Generator().manual_seed(number))


def sample(model, adapter, number):
    rules = [dict(top_k=1), dict(top_k=0, seed=number), dict(top_k=5, seed=number, repetition_penalty=1.3)][number % 3]
    return model.sample(prompt(number), 20, **rules)


def forward(model, adapter, number):
    return model.forward(prompt(number))


def score(model, adapter, number):
    return model.score(prompt(number))


def generate(model, adapter, number):
    ids = prompt(number)
    return adapter.generate(ids, attention_mask=torch.ones_like(ids), max_length=16, do_sample=False, pad_token_id=0)


@pytest.mark.parametrize("calls", [100, pytest.param(250, marks=pytest.mark.slow)])
def test_calls_from_four_threads_are_those_made_alone(calls, model, adapter):
    kinds = sample, forward, score, generate
    jobs = [(kinds[number % 4], number % 40) for number in range(THREADS * calls)]
    alone = {job: job[0](model, adapter, job[1]) for job in set(jobs)}
    together = threading.Barrier(THREADS)

    def caller(first):
        together.wait()
        return [(job, job[0](model, adapter, job[1])) for job in jobs[first::THREADS]]

    with ThreadPoolExecutor(THREADS) as pool:
        made = [result for of_one in pool.map(caller, range(THREADS)) for result in of_one]
    wrong = [(kind.__name__, number) for (kind, number), result in made if not torch.equal(result, alone[kind, number])]
    assert len(made) == THREADS * calls
    assert not wrong, f"{len(wrong)} of {len(made)} calls differ"


@pytest.mark.slow
def test_two_models_that_guess_for_each_other_do_not_wait_for_each_other(model):
    other = GPT2ForSampling.from_pretrained(TINY_KJV, n_positions=LONGEST, context_length_estimate=16, batch_size=2)
    other.to_neuron()
    want = model.sample(prompt(0), 40, top_k=1)
    pairs = [SpeculativeGenerator(other, model, k=2), SpeculativeGenerator(model, other, k=2)] * 2
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda pair: [pair.sample(prompt(0), 40, top_k=1) for _ in range(10)], pairs))
    assert all(torch.equal(tokens, want) for of_one in made for tokens in of_one)


class Meddling:
    """A streamer that calls the model that is streaming."""

    def __init__(self, call):
        self.call = call

    def put(self, value):
        self.call()

    def end(self):
        pass


@pytest.mark.parametrize("kind", [sample, forward, score, generate])
def test_a_call_inside_another_is_an_error(model, adapter, kind):
    ids = prompt(1)
    want = model.sample(ids, 20, top_k=1)

    def meddle(*_):
        kind(model, adapter, 2)

    message = r"was called inside {} of the same model, by a streamer, a criterion or another callback"
    with pytest.raises(InputError, match=message.format(r"sample\(\)")):
        model.sample(ids, 20, top_k=1, streamer=Meddling(meddle))
    with pytest.raises(InputError, match=message.format(r"sample\(\)")):
        model.sample(ids, 20, top_k=1, stopping_criteria_list=StoppingCriteriaList([meddle]))
    options = dict(attention_mask=torch.ones_like(ids), max_length=16, pad_token_id=0)
    with pytest.raises(InputError, match=message.format(r"generate\(\)")):
        adapter.generate(ids, logits_processor=LogitsProcessorList([meddle]), **options)
    assert torch.equal(model.sample(ids, 20, top_k=1), want)


def test_what_follows_a_lost_sequence_is_an_error(model, monkeypatch):
    """After a failure of the engine the caches are empty, so no sequence may continue from them."""
    ids = prompt(3)
    model.forward(ids)
    with pytest.raises(InputError, match=r"tokens from position 20 on would leave a gap: slot 0 holds \d+ tokens"):
        model.forward(ids[:, :1], cache_ids=[20])
    following = model.forward(ids[:, :1], cache_ids=[ids.shape[1]])
    with pytest.raises(KeyboardInterrupt), model.decoder.guarded():
        raise KeyboardInterrupt
    with pytest.raises(InputError, match=r"slot 0 holds 0 tokens \(none after a failed call or reset\)"):
        model.forward(ids[:, :1], cache_ids=[ids.shape[1]])
    model.forward(ids)
    assert torch.equal(model.forward(ids[:, :1], cache_ids=[ids.shape[1]]), following)
