"""Every family in an engine: requests of many lengths together get the tokens that they get alone."""

import numpy as np
import pytest
import torch
from parity import DECODERS, randomized
from test_every_family import tiny

from transformers_neuronx import Engine, SamplingParams
from transformers_neuronx.auto import NeuronAutoModelForCausalLM

DRAW = np.random.default_rng(0)
PROMPTS = [DRAW.integers(3, 100, count).tolist() for count in (1, 3, 30, 9, 17, 2)]


@pytest.mark.parametrize("degree", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", DECODERS)
def test_tokens_are_those_of_transformers(family, degree, tmp_path):
    reference = randomized(tiny(family))
    reference.save_pretrained(tmp_path)
    model = NeuronAutoModelForCausalLM.from_pretrained(tmp_path, n_positions=48, tp_degree=degree)
    model.to_neuron()
    with Engine(model, rows=4, step_tokens=16) as engine:
        params = SamplingParams(max_tokens=15, temperature=0, ignore_eos=True)
        handles = [engine.submit(prompt, params) for prompt in PROMPTS]
        for prompt, handle in zip(PROMPTS, handles, strict=True):
            wanted = reference.generate(
                torch.tensor([prompt]), max_new_tokens=15, do_sample=False, eos_token_id=None, pad_token_id=0
            )
            assert handle.result() == wanted[0, len(prompt) :].tolist()
