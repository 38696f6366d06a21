"""Steps over pages in the form of their programs."""

from pathlib import Path

import numpy as np
import pytest

from transformers_neuronx import Engine, SamplingParams
from transformers_neuronx.gpt2.model import GPT2ForSampling
from transformers_neuronx.serving.paged import PagedSteps

EXAMPLES = Path(__file__).parents[2] / "examples"
KINDS = [
    dict(temperature=0),
    dict(seed=3, top_k=20),
    dict(temperature=0, repetition_penalty=1.3),
    dict(temperature=0, logprobs=1),
]


@pytest.mark.parametrize("cache_tokens", [320, 1024])
@pytest.mark.few(1)
def test_a_step_that_goes_on_is_packed_as_any_other(cache_tokens, monkeypatch):
    """It is made of the one before: that all fields are the same, is compared in each step."""
    model = GPT2ForSampling.from_pretrained(EXAMPLES / "tiny-kjv", n_positions=256)
    model.to_neuron(ahead=False)
    found = []

    def both(steps, before, step, next_of=PagedSteps._next_of):
        noted = steps._noted
        packed = next_of(steps, before, step)
        if packed:
            steps._noted = noted
            found.append((packed, steps._packed(step)))
        return packed

    monkeypatch.setattr(PagedSteps, "_next_of", both)
    draw = np.random.default_rng(0)
    prompts = [draw.integers(3, 1000, length).tolist() for length in (1, 60, 5, 100, 63, 64, 30, 2)]
    with Engine(model, rows=4, step_tokens=32, cache_tokens=cache_tokens) as engine:
        handles = [
            engine.submit(prompt, SamplingParams(max_tokens=70 + 9 * n, ignore_eos=True, **KINDS[n % 4]))
            for n, prompt in enumerate(prompts)
        ]
        for handle in handles[:6]:
            handle.request.streamed = True  # as if someone read each token, so that a step makes one
        assert [len(handle.result()) for handle in handles] == [70 + 9 * n for n in range(8)]
        assert (engine.scheduler.preemptions > 0) == (cache_tokens == 320)
    assert len(found) > 100
    for packed, wanted in found:
        assert packed.key == wanted.key and packed.requests == wanted.requests
        for name in ("tokens", "segments", "samples"):
            assert np.array_equal(getattr(packed, name), getattr(wanted, name)), name
        assert (packed.seen is None) == (wanted.seen is None) and np.array_equal(packed.seen, wanted.seen)
