# ruff: noqa: UP006, UP035
"""One module for several sizes: the kernels and state preprocessors of the autobucketing guide, unchanged."""

from typing import List

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification
from zoo import randomized

from transformers_neuronx import trace as torch_neuronx
from transformers_neuronx.errors import GraphError

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*torch.jit:FutureWarning")


def sequence_length_bucket_kernel(tensor_list: List[torch.Tensor]):
    x = tensor_list[0]
    bucket_dim = 1
    x_shape = x.shape
    tensor_sequence_length = x_shape[bucket_dim]
    batch_size = x_shape[bucket_dim - 1]
    buckets = [128, 512]
    idx = 0
    num_inputs = 3
    bucket = buckets[0]
    reshaped_tensors: List[torch.Tensor] = []
    bucket_idx = 0
    for idx, bucket in enumerate(buckets):
        if tensor_sequence_length <= bucket:
            bucket_idx = idx
            for tensor in tensor_list:
                if num_inputs == 0:
                    break
                delta = bucket - tensor_sequence_length
                padding_shape: List[int] = [batch_size, delta]
                zeros = torch.zeros(padding_shape, dtype=x.dtype)
                reshaped_tensors.append(torch.cat([tensor, zeros], dim=bucket_dim))
                num_inputs -= 1
            break
    return reshaped_tensors, torch.tensor([bucket_idx])


def get_bucket_kernel(*_):
    return torch.jit.script(sequence_length_bucket_kernel)


def bert():
    options = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=100)
    return randomized(BertForSequenceClassification(BertConfig(**options, return_dict=False)))


def encoded(length, real, seed):
    ids = torch.randint(3, 100, (1, length), generator=torch.Generator().manual_seed(seed))
    mask = (torch.arange(length) < real).long()[None]
    return ids * mask, mask


def test_bert_in_two_buckets(tmp_path):
    model = bert()
    examples = [encoded(128, 100, 0), encoded(512, 400, 1)]
    config = torch_neuronx.BucketModelConfig(get_bucket_kernel)
    traced = torch_neuronx.bucket_model_trace(lambda *_: (bert(), {}), examples, config)
    single = torch_neuronx.trace(model, examples[0])
    assert len(traced.weights) == len(single.weights)  # though each bucket has a new model
    torch.jit.save(traced, tmp_path / "bert.pt")
    loaded = torch.jit.load(tmp_path / "bert.pt")
    wanted = []
    for length in (122, 444, 128, 512, 1):
        inputs = encoded(length, max(1, length - 5), length)
        want = model(*inputs)[0].detach()
        wanted.append(want)
        for module in (traced, loaded):
            torch.testing.assert_close(module(*inputs)[0], want, atol=1e-4, rtol=1e-4)
    assert torch.cat(wanted).std() > 0.01
    with pytest.raises((GraphError, RuntimeError), match="needs 2 inputs, got 0"):
        traced(*encoded(513, 5, 0))


def state_preprocessor(
    shapes_collection: List[List[List[int]]], states: List[torch.Tensor], bucket_idx_tensor: torch.Tensor
) -> List[torch.Tensor]:
    bucket_idx = torch.ops.aten.Int(bucket_idx_tensor)
    shapes = shapes_collection[bucket_idx]
    sliced_state_tensors = []

    for i in range(len(shapes)):
        expected_shape = shapes[i]
        state_tensor = states[i]
        state_tensor_shape = state_tensor.shape
        for j, npos in enumerate(expected_shape):
            state_tensor_dim_length = state_tensor_shape[j]
            state_tensor = torch.ops.aten.slice(
                state_tensor, dim=j, start=state_tensor_dim_length - npos, end=state_tensor_dim_length
            )
        sliced_state_tensors.append(state_tensor)

    return sliced_state_tensors


class Cached(torch.nn.Module):
    """Attention of one token over a shifting cache of `width` positions, the newest last."""

    def __init__(self, width):
        super().__init__()
        torch.manual_seed(0)
        self.qkv = torch.nn.Linear(8, 24)
        self.keys = torch.nn.Parameter(torch.zeros(1, width, 8), requires_grad=False)
        self.values = torch.nn.Parameter(torch.zeros(1, width, 8), requires_grad=False)

    def forward(self, x, seen):
        q, k, v = self.qkv(x).chunk(3, -1)
        keys, values = torch.cat([self.keys[:, 1:], k], 1), torch.cat([self.values[:, 1:], v], 1)
        scores = (q @ keys.mT).masked_fill(seen[:, None] == 0, -1e9)
        return scores.softmax(-1) @ values, keys, values


def by_width(inputs: List[torch.Tensor], widths: List[int]):
    bucket = 0
    while widths[bucket] < inputs[1].shape[1]:
        bucket += 1
    missing = widths[bucket] - inputs[1].shape[1]
    return [inputs[0], torch.nn.functional.pad(inputs[1], [missing, 0])], torch.tensor(bucket)


def test_buckets_share_one_cache(tmp_path):
    """A sequence that outgrows its bucket continues in the next one with the same cache."""
    widths = [4, 16]

    def model(width):
        module = Cached(width)
        return module, {module.keys: 1, module.values: 2}

    config = torch_neuronx.BucketModelConfig(
        lambda: torch.jit.script(by_width),
        bucket_kernel_constant_args=(widths,),
        shared_state_buffer=[torch.zeros(1, 16, 8), torch.zeros(1, 16, 8)],
        shared_state_buffer_preprocessor=lambda: torch.jit.script(state_preprocessor),
        func_kwargs=[dict(width=width) for width in widths],
    )
    examples = [(torch.zeros(1, 1, 8), torch.zeros(1, width, dtype=torch.int64)) for width in widths]
    traced = torch_neuronx.bucket_model_trace(model, examples, config)
    assert len(traced.weights) == 2 and len(list(traced.parameters())) == 2
    torch.jit.save(traced, tmp_path / "cached.pt")
    traced = torch.jit.load(tmp_path / "cached.pt")
    tokens = torch.randn(10, 1, 1, 8, generator=torch.Generator().manual_seed(1))
    module = Cached(16)
    for count, token in enumerate(tokens, 1):
        whole = torch.zeros(1, 16, dtype=torch.int64)
        whole[:, -count:] = 1
        with torch.no_grad():
            want, module.keys.data, module.values.data = module(token, whole)
        got = traced(token, torch.ones(1, count, dtype=torch.int64))
        torch.testing.assert_close(got[0], want, atol=1e-5, rtol=1e-5)
    assert torch_neuronx.read_states(traced)[0].shape == (1, 16, 8)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (dict(shared_state_buffer=[torch.zeros(1, 16, 8)]), "must have the 1 states of shared_state_buffer, got 2"),
        (dict(shared_state_buffer=[torch.zeros(1, 16, 8)] * 2), r"state must be torch.float32\[1, 4, 8\], got"),
        (
            dict(
                shared_state_buffer=[torch.zeros(1, 16, 8), torch.zeros(1, 16, 8)],
                shared_state_buffer_preprocessor=lambda: lambda shapes, states, bucket: [s[:, ::4] for s in states],
            ),
            "slices of the states without steps",
        ),
    ],
)
def test_what_a_shared_state_has_to_be(options, wanted):
    def model():
        module = Cached(4)
        return module, {module.keys: 1, module.values: 2}

    config = torch_neuronx.BucketModelConfig(lambda: None, **options)
    example = torch.zeros(1, 1, 8), torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(GraphError, match=wanted):
        torch_neuronx.bucket_model_trace(model, [example], config)
