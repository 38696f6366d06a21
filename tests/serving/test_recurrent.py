"""Layers that keep a state of a sequence: alone, in batches, and in engines, with draft tokens that are wrong."""

import numpy as np
import pytest
import torch
from recurrent import RecurrentForSampling, checkpoint

from transformers_neuronx import Engine, SamplingParams
from transformers_neuronx.errors import ConfigError
from transformers_neuronx.speculation import PromptLookup

DRAW = np.random.default_rng(5)
PHRASE = DRAW.integers(3, 96, 6).tolist()
PROMPTS = [DRAW.integers(3, 96, count).tolist() for count in (1, 3, 40, 9)] + [PHRASE * 5, PHRASE * 3 + PHRASE[:2]]
SIZES = dict(rows=3, step_tokens=16, joined_tokens=16)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    directory = tmp_path_factory.mktemp("recurrent")
    return directory, checkpoint(directory)


@pytest.fixture(scope="module")
def model(both):
    model = RecurrentForSampling.from_pretrained(both[0], n_positions=64, batch_size=2, context_length_estimate=[8, 32])
    model.to_neuron()
    return model


def wanted(reference, prompt, count=12):
    ids = torch.tensor([prompt])
    for _ in range(count):
        with torch.no_grad():
            ids = torch.cat([ids, reference(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return ids[0, len(prompt) :].tolist()


@pytest.mark.parametrize("degree", [1, 2])
def test_tokens_are_those_of_the_same_model_in_torch(both, model, degree):
    if degree > 1:
        sizes = dict(n_positions=64, batch_size=2, context_length_estimate=[8, 32])
        model = RecurrentForSampling.from_pretrained(both[0], tp_degree=degree, **sizes)
        model.to_neuron()
    for pair in (PROMPTS[:2], PROMPTS[2:4], PROMPTS[4:]):
        longest = max(map(len, pair))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in pair])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in pair])
        found = model.sample(ids, longest + 12, top_k=1, attention_mask=mask, eos_token_override=-1)
        assert found[:, longest:].tolist() == [wanted(both[1], prompt) for prompt in pair]


def test_logits_are_those_of_the_same_model_in_torch(both, model):
    ids = torch.tensor([PROMPTS[2]])
    with torch.no_grad():
        logits = both[1](ids).logits
    found = model(ids, output_all_logits=True)
    assert (found - logits).abs().max() < 1e-5 * logits.abs().max()
    model(ids[:, :30])
    after = model(ids[:, 30:31], cache_ids=[30])
    assert (after - logits[:, 30]).abs().max() < 1e-5 * logits.abs().max(), "a token continues the state"


@pytest.mark.parametrize("draft", [PromptLookup(), None])
@pytest.mark.few(1)
def test_requests_together_get_what_each_gets_alone(both, model, draft):
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=1)
    with Engine(model, draft=draft, cache_tokens=128, **SIZES) as engine:
        handles = [engine.submit(prompt, params) for prompt in PROMPTS * 2]
        for prompt, handle in zip(PROMPTS * 2, handles, strict=True):
            assert handle.result() == wanted(both[1], prompt)
        alone = [engine.submit(prompt, params) for prompt in PROMPTS[:1]]
        assert alone[0].result() == handles[0].result() and alone[0].logprobs == handles[0].logprobs, "bit by bit"
        assert all(handle.usage.cached_tokens == 0 for handle in handles), "states of a beginning are not kept"
        assert sum(handle.usage.accepted_tokens for handle in handles) > 0 or draft is None
        assert engine.scheduler.cache.unused


def test_a_model_with_states_makes_no_draft_tokens_for_others(model):
    with pytest.raises(ConfigError, match="keeps states"):
        Engine(model, draft=model, **SIZES)
