"""The original's `testing`: random batches with padding on the left, and a comparison with a Hugging Face model."""

from __future__ import annotations

from typing import Any

import torch

from transformers_neuronx.huggingface.adapter import HuggingFaceGenerationModelAdapter

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # ids, mask, start_ids


def batch_varying_lengths(vocab_size: int, batch_size: int, context_length: int) -> Batch:
    """Return ids and mask [batch, n], and start_ids [batch], with random padding in each row."""
    starts = torch.randint(0, context_length, [batch_size])
    mask = (torch.arange(context_length) >= starts[:, None]).int()
    return torch.randint(0, vocab_size, [batch_size, context_length]), mask, starts


def batch_all_lengths(vocab_size: int, context_length: int) -> Batch:
    """Return ids and mask [n, n], and start_ids [n]: row i has i columns of padding, where ids are 0."""
    mask = torch.ones(context_length, context_length).triu().int()
    return torch.randint(0, vocab_size, mask.shape) * mask, mask, torch.arange(context_length)


def batch_full_lengths(vocab_size: int, batch_size: int, context_length: int) -> Batch:
    """Return ids and mask [batch, n], and start_ids [batch], without padding."""
    ids = torch.randint(0, vocab_size, [batch_size, context_length])
    return ids, torch.ones_like(ids), torch.zeros(batch_size, dtype=torch.int64)


def validate(
    model: Any,
    neuron: Any,
    config: Any,
    inputs: Batch,
    sequence_length: int,
    compiler_args: Any = None,
    rtol: float = 1e-5,
    atol: float = 1e-5,
) -> None:
    """Compile a model, and compare its greedy tokens with those of a Hugging Face model.

    `inputs` are ids, mask and start_ids. `sequence_length` counts prompt and new tokens. `compiler_args` is ignored.
    Raises AssertionError if tokens of `generate()` or of `sample()` differ.
    """
    ids, mask, starts = inputs
    neuron.to_neuron()
    count = sequence_length - ids.shape[1]
    options: dict[str, Any] = dict(max_new_tokens=count, min_new_tokens=count, do_sample=False)
    wanted = model.generate(input_ids=ids, attention_mask=mask, **options)
    adapter = HuggingFaceGenerationModelAdapter(config, neuron)
    generated = adapter.generate(input_ids=ids, attention_mask=mask, **options)
    sampled = neuron.sample(ids, sequence_length, start_ids=starts, top_k=1, eos_token_override=-1)
    for found in (generated, sampled):
        torch.testing.assert_close(found, wanted, rtol=rtol, atol=atol)
