"""Draft tokens in an engine: the tokens are those without them, and fewer steps make them."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from transformers_neuronx import EagleDraft, Engine, SamplingParams, SparseAttnConfig
from transformers_neuronx.config import NeuronConfig
from transformers_neuronx.errors import ConfigError
from transformers_neuronx.gpt2.model import GPT2ForSampling
from transformers_neuronx.serving.drafting import Costs
from transformers_neuronx.speculation import PromptLookup

EXAMPLES = Path(__file__).parents[2] / "examples"
LONGEST = 192
SIZES = dict(rows=4, step_tokens=32, joined_tokens=32, draft_tokens=3)  # of all engines, so that they share programs


def loaded(name, **options):
    model = GPT2ForSampling.from_pretrained(EXAMPLES / name, **dict(n_positions=LONGEST) | options)
    model.to_neuron(ahead=False)
    return model


@pytest.fixture(scope="module")
def model():
    return loaded("tiny-kjv")


@pytest.fixture(scope="module")
def small():
    return loaded("tiny-kjv-draft")


def request(number):
    """A prompt that repeats itself, sometimes shared, and parameters of all kinds."""
    draw = np.random.default_rng(number % 7)
    phrase = draw.integers(3, 1000, 5).tolist()
    kinds = [
        dict(temperature=0),
        dict(seed=number, temperature=0.7),
        dict(seed=number, top_k=20, logprobs=2),
        dict(temperature=0, repetition_penalty=1.2),
        dict(temperature=0, logit_bias={phrase[0]: 5.0}),
    ]
    params = SamplingParams(max_tokens=10 + number % 20, **kinds[number % 5])
    return [*phrase * (1 + number % 9), *phrase[: number % 4]], params


def answers(engine, numbers):
    """Submit requests from four threads, and return what each got."""

    def some(first):
        handles = [(n, engine.submit(*request(n))) for n in numbers[first::4]]
        return {n: (handle.result(), handle.logprobs, handle.finish_reason) for n, handle in handles}

    with ThreadPoolExecutor(4) as pool:
        return {n: got for each in pool.map(some, range(4)) for n, got in each.items()}


@pytest.fixture(scope="module")
def wanted(model):
    with Engine(model, **SIZES) as engine:
        return answers(engine, range(40))


@pytest.mark.compiled_ahead
@pytest.mark.parametrize(
    ("source", "cache_tokens"),
    [("text", None), ("model", LONGEST), pytest.param("model", None, marks=pytest.mark.slow)],
)
def test_tokens_and_logprobs_are_those_without(source, cache_tokens, model, small, wanted):
    draft = PromptLookup() if source == "text" else small
    with Engine(model, **SIZES, cache_tokens=cache_tokens, draft=draft) as engine:
        before = set(model.decoder.store.stored) | set(small.decoder.store.stored)
        assert answers(engine, range(40)) == wanted
        assert before == set(model.decoder.store.stored) | set(small.decoder.store.stored), "nothing compiles"
        assert engine.scheduler.cache.unused


def test_right_draft_tokens_save_steps(model, small):
    """A model that drafts for itself is always right; then each step gives one token more than it has guesses."""
    params = SamplingParams(max_tokens=41, temperature=0, ignore_eos=True)
    with Engine(model, **SIZES, draft=model) as engine:
        steps = []
        engine._loop.steps.start = lambda packed, start=engine._loop.steps.start: steps.append(packed) or start(packed)
        handle = engine.submit([5, 6, 7], params)
        tokens = handle.result()
    assert len(steps) == 1 + 40 / 4 and handle.usage.accepted_tokens == engine._records.draft_tokens == 30
    with Engine(model, **SIZES, draft=small) as engine:
        handle = engine.submit([5, 6, 7], params)
        assert handle.result() == tokens and 0 < handle.usage.accepted_tokens < 40
    assert engine._records.draft_tokens > engine._records.accepted_tokens == handle.usage.accepted_tokens


@pytest.mark.parametrize("source", ["head", "text", "model"])
@pytest.mark.few(1)
def test_drafts_that_pay_by_measured_times(source, model, small, wanted):
    """Nothing says how many there are, as times differ; tokens do not."""
    drafts = dict(text=PromptLookup(), model=small, head=EagleDraft.from_pretrained(EXAMPLES / "tiny-kjv-eagle"))
    with Engine(model, **SIZES | dict(joined_tokens=None), draft=drafts[source]) as engine:
        costs = engine.scheduler.limits.costs
        assert costs.sizes[0] == 1 and min(costs.seconds) > 0 and (costs.drafting > 0) == (source != "text")
        got = answers(engine, range(12))
    assert [got[number][0] for number in range(12)] == [wanted[number][0] for number in range(12)]


@pytest.mark.parametrize("pay", [True, False])
def test_steps_overlap_while_drafts_do_not_pay(pay, model, wanted):
    """Then a step starts before the tokens of the one before are read, and makes several of a row that runs alone."""
    with Engine(model, **SIZES | dict(joined_tokens=None), draft=PromptLookup()) as engine:
        size, drafting = engine.scheduler.limits.tokens, engine.scheduler.drafting
        drafting.costs = Costs([1, size], [1.0, 1.0] if pay else [1.0, 1.0 + size], 0.0)
        drafting.took = lambda *step: None  # what steps really take, which differs, has no say here
        assert {n: got[0] for n, got in answers(engine, range(40)).items()} == {n: got[0] for n, got in wanted.items()}
        steps = []
        engine._loop.steps.start = lambda packed, start=engine._loop.steps.start: steps.append(packed) or start(packed)
        handle = engine.submit([5, 6, 7], SamplingParams(max_tokens=100, temperature=0, ignore_eos=True))
        assert len(handle.result()) == 100 and engine.scheduler.cache.unused
    many = any((packed.samples["left"] > 1).any() for packed in steps)
    assert many != pay and engine.scheduler.overlaps != pay


def test_cancelled_requests(model, small):
    with Engine(model, **SIZES, draft=small) as engine:
        long = [engine.submit([n, 6, 7] * 20, SamplingParams(max_tokens=100, ignore_eos=True)) for n in range(8)]
        next(iter(long[0]))
        for handle in long[::2]:
            handle.cancel()
        assert [len(handle.result()) for handle in long[1::2]] == [100] * 4
        assert {handle.finish_reason for handle in long[::2]} == {"abort"}
        assert engine.scheduler.cache.unused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(draft_tokens=0), "draft_tokens must be from 1 to 32, got 0"),
        (dict(draft="short"), "n_positions of a draft must be at least 192, got 128"),
    ],
)
def test_drafts_that_do_not_fit(options, message, model, small):
    if options.get("draft"):
        options["draft"] = loaded("tiny-kjv-draft", n_positions=128)
    with pytest.raises(ConfigError, match=message):
        Engine(model, **SIZES | dict(draft=small) | options)


@pytest.fixture(scope="module")
def masked():
    """A model and a draft whose attention is by a mask of all positions, so that slots are their cache."""
    mask = torch.ones(LONGEST, LONGEST, dtype=torch.bool).tril()
    switches = NeuronConfig(sparse_attn=SparseAttnConfig("custom", sparse_mask_dict={(LONGEST, LONGEST): mask}))
    sizes = dict(batch_size=4, prompt_batch_size=1, context_length_estimate=16, neuron_config=switches)
    return [loaded(name, **sizes) for name in ("tiny-kjv", "tiny-kjv-draft")]


@pytest.mark.parametrize("source", ["text", "model"])
@pytest.mark.few(1)
def test_slots_verify_draft_tokens_too(source, masked, wanted):
    target, draft = masked
    with Engine(target, step_tokens=32, draft=PromptLookup() if source == "text" else draft) as engine:
        got = answers(engine, range(40))
        assert engine.scheduler.cache.unused
    for number, (tokens, logprobs, reason) in wanted.items():
        assert (got[number][0], got[number][2]) == (tokens, reason)
        np.testing.assert_allclose([own for own, _ in got[number][1]], [own for own, _ in logprobs], atol=1e-4)
    assert sampled_once(target, draft) < 41 // 2


def sampled_once(target, draft):
    """The number of steps for 41 tokens of a request."""
    with Engine(target, step_tokens=32, draft=draft) as engine:
        steps, choose = [], engine._loop.steps.choose
        engine._loop.steps.choose = lambda *step: steps.append(step) or choose(*step)
        handle = engine.submit([5, 6, 7], SamplingParams(max_tokens=41, temperature=0, ignore_eos=True))
        assert len(handle.result()) == 41 and handle.usage.accepted_tokens > 0
    return len(steps)


def test_drafts_with_too_few_slots(masked, small):
    with pytest.raises(ConfigError, match="batch_size of a draft must be at least 4, got 1"):
        Engine(masked[0], draft=small)
