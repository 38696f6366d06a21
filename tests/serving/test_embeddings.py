"""Prompts as vectors: pooled last hidden states, beside requests that generate."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GPT2Model

from transformers_neuronx import Engine, SamplingParams, SparseAttnConfig
from transformers_neuronx.config import NeuronConfig
from transformers_neuronx.errors import CheckpointError, InputError
from transformers_neuronx.gpt2.model import GPT2ForSampling
from transformers_neuronx.serving.kv_cache import KVCache
from transformers_neuronx.serving.limits import Limits
from transformers_neuronx.serving.pages import Pages
from transformers_neuronx.serving.request import Request
from transformers_neuronx.serving.scheduler import Scheduler
from transformers_neuronx.speculation import PromptLookup
from transformers_neuronx.weights.directories import load_pooling

TINY_KJV = Path(__file__).parents[2] / "examples" / "tiny-kjv"
LONGEST = 192
SIZES = dict(rows=4, step_tokens=32, joined_tokens=32)
DRAW = np.random.default_rng(0)
PROMPTS = [DRAW.integers(0, 1000, count).tolist() for count in (1, 2, 5, 33, 70, 100, 31, 64, 65, 190)]


def loaded(**options):
    model = GPT2ForSampling.from_pretrained(TINY_KJV, n_positions=LONGEST, batch_size=4, **options)
    model.to_neuron(ahead=False)
    return model


@pytest.fixture(scope="module")
def model():
    return loaded()


@pytest.fixture(scope="module")
def wanted():
    """`wanted(prompt, pooling)`: the vector by Transformers."""
    reference = GPT2Model.from_pretrained(TINY_KJV)

    def vector(prompt, pooling):
        hidden = reference(torch.tensor([prompt])).last_hidden_state[0].detach().numpy()
        return dict(last=hidden[-1], cls=hidden[0], mean=hidden.mean(0))[pooling]

    return vector


def check(engine, wanted, poolings=("last", "mean", "cls")):
    asked = [(prompt, pooling) for prompt in PROMPTS for pooling in poolings]
    handles = [engine.embed(*each) for each in asked]
    for each, handle in zip(asked, handles, strict=True):
        assert handle.result() == [] and handle.finish_reason == "stop"
        np.testing.assert_allclose(handle.embedding, wanted(*each), atol=2e-5)
    return handles


@pytest.mark.parametrize("draft", [PromptLookup(), None])
@pytest.mark.few(1)
def test_vectors_are_those_of_transformers_beside_others(model, wanted, draft):
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    with Engine(model, draft=draft, **SIZES) as engine:
        alone = [engine.submit(prompt, params).result() for prompt in PROMPTS[:6]]
        others = [engine.submit(prompt, params) for prompt in PROMPTS[:6]]
        check(engine, wanted)
        assert [handle.result() for handle in others] == alone
        assert engine.scheduler.cache.unused


def test_the_last_token_needs_only_what_the_cache_does_not_have(model, wanted):
    with Engine(model, cache_tokens=2048, **SIZES) as engine:
        check(engine, wanted, ["last"])
        again = check(engine, wanted)
        cached = {pooling: [handle.usage.cached_tokens for handle in again[place::3]] for place, pooling in
                  enumerate(("last", "mean", "cls"))}  # fmt: skip
    assert max(cached["last"]) >= 128 and not any(cached["mean"] + cached["cls"])


def test_who_loses_its_pages_starts_again(model, wanted):
    with Engine(model, cache_tokens=256, **SIZES) as engine:
        handles = [engine.embed(PROMPTS[-1], "mean", priority=1) for _ in range(3)]
        urgent = [
            engine.submit(PROMPTS[4], SamplingParams(max_tokens=60, priority=0, ignore_eos=True)) for _ in range(3)
        ]
        for handle in (*urgent, *handles):
            handle.result()
        for handle in handles:
            np.testing.assert_allclose(handle.embedding, wanted(PROMPTS[-1], "mean"), atol=2e-5)


def test_who_loses_its_pages_during_its_last_step_starts_again():
    """What was summed by then is left out, so the request must not end with it."""
    scheduler = Scheduler(KVCache([Pages(2, 4)], 4), Limits(8, 8, 4, 8))
    pooling = Request(0, [1] * 6, SamplingParams(max_tokens=1, priority=1), pooling="mean")
    scheduler.add(pooling)
    step = scheduler.schedule()
    urgent = Request(1, [2] * 6, SamplingParams(max_tokens=1))
    scheduler.add(urgent)
    after = scheduler.schedule()
    assert [work.request for work in after] == [urgent] and pooling.preempted == 1
    assert scheduler.update(step, {}) == [] and pooling.reason is None
    assert scheduler.update(after, {1: [3]}) == [urgent]
    assert scheduler.update(scheduler.schedule(), {}) == [pooling] and pooling.reason == "stop"


def test_one_that_is_cancelled_leaves_nothing(model, wanted):
    with Engine(model, **SIZES) as engine:
        handles = [engine.embed(PROMPTS[-1], "mean", cache_salt=str(number)) for number in range(8)]
        for handle in handles[::2]:
            handle.cancel()
        for handle in handles[1::2]:
            handle.result()
            np.testing.assert_allclose(handle.embedding, wanted(PROMPTS[-1], "mean"), atol=2e-5)
        assert {handle.finish_reason for handle in handles[::2]} <= {"abort", "stop"}
        assert engine.scheduler.cache.unused


def test_what_is_refused(model):
    with Engine(model, **SIZES) as engine:
        with pytest.raises(InputError, match="pooling must be last, mean or cls, got 'first'"):
            engine.embed([1], "first")
        with pytest.raises(InputError, match="token ids must be from 0 to 1022, got 1023"):
            engine.embed([1, 1023])
        with pytest.raises(InputError, match="the prompt is empty"):
            engine.embed([])
        with pytest.raises(InputError, match="need 193 positions, but the engine has 192"):
            engine.embed([1] * 193)
    mask = torch.ones(LONGEST, LONGEST, dtype=torch.bool).tril()
    switches = NeuronConfig(sparse_attn=SparseAttnConfig("custom", sparse_mask_dict={(LONGEST, LONGEST): mask}))
    for engine in (Engine(model, adjustments=False, **SIZES), Engine(loaded(neuron_config=switches))):
        with engine, pytest.raises(InputError, match="embeddings need a decoder whose cache is in pages"):
            engine.embed([1])


POOLED = {
    "nothing": (None, "last"),
    "the last": (dict(pooling_mode_cls_token=False, pooling_mode_lasttoken=True, word_embedding_dimension=9), "last"),
    "the mean": (dict(pooling_mode_cls_token=False, pooling_mode_mean_tokens=True, include_prompt=True), "mean"),
    "newer": (dict(pooling_mode="cls"), "cls"),
}


@pytest.mark.parametrize("name", POOLED)
def test_a_checkpoint_says_how_it_pools(name, tmp_path):
    said, wanted = POOLED[name]
    if said:
        save_pooling(tmp_path, said)
    assert load_pooling(tmp_path) == wanted


@pytest.mark.parametrize("modes", [["max_tokens"], ["mean_tokens", "max_tokens"], []])
def test_other_ways_to_pool(modes, tmp_path):
    save_pooling(tmp_path, {f"pooling_mode_{mode}": True for mode in modes})
    with pytest.raises(CheckpointError, match=f"are pooled by {', '.join(modes)}: supported are lasttoken, mean_tok"):
        load_pooling(tmp_path)


def save_pooling(folder, said):
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(said))
