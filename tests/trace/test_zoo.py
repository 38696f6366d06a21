"""Traced architectures of Transformers give PyTorch's results."""

import pytest
import torch
from zoo import ZOO, make

from transformers_neuronx.trace import trace

# Architectures that are not traced, and why.
REFUSED = {"mixtral": "grouped_mm"}
QUICK = ["bert", "swin"]


def tensors(result):
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, dict):
        for value in result.values():
            yield from tensors(value)
    elif isinstance(result, list | tuple):
        for value in result:
            yield from tensors(value)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in ZOO if name not in REFUSED]
)
def test_traced_models_agree(name):
    model, inputs = make(name)
    with torch.no_grad():
        want = list(tensors(model(*inputs)))
    got = list(tensors(trace(model, inputs)(*inputs)))
    assert len(got) == len(want) > 0
    for ours, theirs in zip(got, want, strict=True):
        assert theirs.float().std() > 1e-3, "these outputs say nothing"
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_most_of_the_zoo_is_traced():
    assert len(ZOO) >= 40 and len(REFUSED) <= len(ZOO) - 38
