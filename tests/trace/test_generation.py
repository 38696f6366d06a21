"""A decoder compiled at a fixed length for `generate()`, which pads the tokens so far to that length."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions
from zoo import SMALL, randomized

from transformers_neuronx.trace import trace

LENGTH = 24


@pytest.fixture
def model():
    config = GPT2Config(**SMALL | dict(n_embd=32, n_layer=2, n_head=4, n_positions=64), use_cache=False)
    return randomized(GPT2LMHeadModel(config))


def test_generate_drives_a_traced_gpt2(model):
    positions = torch.arange(LENGTH).int()[None]
    ids = torch.randint(0, 64, (1, LENGTH)).int()
    # The order is that of the model's forward: ids, cache, mask, token types, positions, …
    traced = trace(model, (ids, None, torch.ones(1, 1, LENGTH), None, positions, None, None, None))

    class Driven(GPT2LMHeadModel):
        def __call__(self, *_, **inputs):
            count = inputs["input_ids"].shape[1]
            padded = torch.nn.functional.pad(inputs["input_ids"], (0, LENGTH - count)).int()
            seen = (torch.arange(LENGTH) < count).float()[None, None]
            logits = traced(padded, None, seen, None, positions, None, None, None)["logits"]
            return CausalLMOutputWithCrossAttentions(logits=logits[:, :count])

    driven = Driven(model.config).eval()
    prompt = torch.tensor([[5, 17, 33]])
    options = dict(max_length=LENGTH, do_sample=False, use_cache=False, eos_token_id=None)
    want = model.generate(prompt, **options)
    assert torch.equal(driven.generate(prompt, **options), want)
    assert len(set(want[0].tolist())) > 5
