"""Helpers of the families' tests: tiny random models of Transformers, and comparison with their logits."""

import copy

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Mistral4Config, Mistral4ForCausalLM

from transformers_neuronx.huggingface.auto import families, family_of
from transformers_neuronx.huggingface.device_cache import CACHE
from transformers_neuronx.models.encoder_decoder import EncoderDecoderForSampling

ONE_FILE = [name for name in families() if family_of(name).__module__.split(".")[1] == "families"]
DECODERS = [  # those with a folder; `make test` runs the tests of every family for these
    name
    for name in families()
    if not (name in ONE_FILE or family_of(name).family.images or issubclass(family_of(name), EncoderDecoderForSampling))
]
EVERY_DECODER = [*DECODERS, *(pytest.param(name, marks=pytest.mark.slow) for name in ONE_FILE)]
# Transformers lists it among models that read images.
AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)
TOLERANCE = 1e-5  # relative to the largest logit, in f32


def assert_close(got, want, tolerance=TOLERANCE):
    """Assert that logits differ by at most `tolerance` times the largest one."""
    difference = (got - want).abs().max() / want.abs().max()
    assert torch.isfinite(got).all()
    assert difference <= tolerance, f"the logits part by {difference:.2e} of the largest"


def prompts(vocab_size, lengths, seed=0):
    generator = np.random.default_rng(seed)
    return [generator.integers(0, vocab_size, length).tolist() for length in lengths]


def padded(rows, side, pad=0):
    """Return ids and attention mask of rows of unequal lengths."""
    width = max(map(len, rows))
    blanks = [[pad] * (width - len(row)) for row in rows]
    ids = [blank + row if side == "left" else row + blank for row, blank in zip(rows, blanks, strict=True)]
    mask = [
        [0] * len(blank) + [1] * len(row) if side == "left" else [1] * len(row) + [0] * len(blank)
        for row, blank in zip(rows, blanks, strict=True)
    ]
    return torch.tensor(ids), torch.tensor(mask)


def randomized(config, kind=AutoModelForCausalLM):
    """Return a model with weights that make errors visible: default ones give almost uniform attention."""
    torch.manual_seed(0)
    model = kind.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.copy_(torch.randn_like(weight) * 0.3)
            else:
                weight.copy_(torch.rand_like(weight) + 0.5)
            if name.endswith("A_log"):  # fast decays hide a state, and Transformers' sums of them lose 1e-5 in f32
                weight.sub_(3.5)
        for name, buffer in model.named_buffers():
            if name.endswith(("score_correction_bias", "expert_bias")):  # of sizes that decide which expert is chosen
                buffer.copy_(torch.randn_like(buffer) * 0.3)
            if name.endswith("layer_scalar"):
                buffer.copy_(torch.rand_like(buffer) + 0.5)
    return model


@torch.inference_mode()
def continued(reference, prompt, tokens):
    """Return the reference's logits after each token of the prompt, and of `tokens`, which are fed one by one."""
    reference = copy.deepcopy(reference)  # some models keep values of an earlier sequence
    output = reference(torch.tensor([prompt]), use_cache=True)
    logits = [output.logits[0]]
    for count, token in enumerate(tokens, len(prompt)):
        # Bamba's code begins at position 0 in every call without positions.
        how = dict(position_ids=torch.tensor([[count]])) if reference.config.model_type == "bamba" else {}
        output = reference(torch.tensor([[token]]), use_cache=True, **{CACHE: getattr(output, CACHE)}, **how)
        logits.append(output.logits[0])
    return torch.cat(logits).float()
