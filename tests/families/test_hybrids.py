"""Families whose layers keep states: long sequences, and requests together with draft tokens that are wrong."""

import numpy as np
import pytest
import torch
from one_file import WITH_STATES
from parity import assert_close, prompts, randomized
from test_every_family import tiny

from transformers_neuronx import Engine, SamplingParams
from transformers_neuronx.huggingface.auto import NeuronAutoModelForCausalLM
from transformers_neuronx.speculation import PromptLookup


def opened(reference, directory, **options):
    reference.save_pretrained(directory)
    model = NeuronAutoModelForCausalLM.from_pretrained(directory, **options)
    model.to_neuron()
    return model


@pytest.mark.parametrize("family", ["qwen35text", "granitemoehybrid"])
@pytest.mark.parametrize("degree", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_states_over_two_thousand_tokens(family, degree, tmp_path):
    """What the first tokens left still matters at the end: the decays are slow."""
    config = tiny(family)
    config.max_position_embeddings = 2048
    reference = randomized(config)
    with torch.no_grad():
        for name, weight in reference.named_parameters():
            if name.endswith("A_log"):
                weight.fill_(-9)
    [ids] = prompts(131, [2000])
    model = opened(reference, tmp_path, n_positions=[2048], context_length_estimate=256, tp_degree=degree)
    with torch.no_grad():
        want, other = (reference(torch.tensor([row])).logits[0, -200:] for row in (ids, [ids[0] ^ 1, *ids[1:]]))
    assert (want - other).abs().max() > 1e-3 * want.abs().max()
    assert_close(model.forward([ids], output_all_logits=True)[0, -200:], want)


@pytest.mark.parametrize("family", sorted(WITH_STATES))
@pytest.mark.parametrize("draft", [None, PromptLookup()], ids=["plain", "draft tokens"])
@pytest.mark.few(2)
@pytest.mark.usefixtures("needs_pages")
def test_requests_together_get_what_each_gets_alone(family, draft, tmp_path):
    reference = randomized(tiny(family))
    model = opened(reference, tmp_path, n_positions=64, context_length_estimate=16)
    phrase = np.random.default_rng(5).integers(3, 131, 6).tolist()
    rows = [*prompts(131, [1, 3, 40, 9]), phrase * 5, phrase * 3 + phrase[:2]]
    greedy = dict(do_sample=False, max_new_tokens=12, eos_token_id=None, pad_token_id=0)
    with torch.no_grad():
        tensors = [torch.tensor([row]) for row in rows]
        made = [reference.generate(row, attention_mask=torch.ones_like(row), **greedy) for row in tensors]
    want = [whole[0, len(row) :].tolist() for whole, row in zip(made, rows, strict=True)]
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    with Engine(model, draft=draft, rows=3, step_tokens=16, joined_tokens=16, cache_tokens=128) as engine:
        handles = [engine.submit(row, params) for row in rows]
        assert [handle.result() for handle in handles] == want
        assert engine.scheduler.cache.unused
