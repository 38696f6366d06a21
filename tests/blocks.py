"""A caller that gives blocks of a cache to sequences, as vLLM does, and calls a model with the original's arguments."""

from types import SimpleNamespace

import numpy as np
import torch

from transformers_neuronx.config import ContinuousBatchingConfig, NeuronConfig


def batching(size, count, sequences=4, longest=64, chunked=True, **switches):
    """The NeuronConfig of a model with `count` blocks of `size` positions."""
    config = ContinuousBatchingConfig(
        max_num_seqs=sequences,
        max_model_len=longest,
        optimized_paged_attention=True,
        enable_chunked_prefill=chunked,
    )
    config.init_cache_engine(block_size=size, num_blocks=count)
    return NeuronConfig(continuous_batching=config, **switches)


class Caller:
    """Blocks in any order for sequences of tokens, by their number."""

    def __init__(self, model, seed=0):
        self.model = model
        blocks = model.options.blocks
        self.size = blocks.size
        self.free = np.random.default_rng(seed).permutation(blocks.count).tolist()
        self.tables = {}

    def grow(self, number, end):
        """Give a sequence blocks for its first `end` positions."""
        table = self.tables.setdefault(number, [])
        while len(table) * self.size < end:
            table.append(self.free.pop())

    def slots(self, number, start, end):
        return [self.tables[number][at // self.size] * self.size + at % self.size for at in range(start, end)]

    def arguments(self, parts, padding=0):
        """The arguments for `parts` of sequences, {number: (tokens, start, end)}, with some padding after them."""
        ids, positions, slots = [], [], []
        for number, (tokens, start, end) in parts.items():
            self.grow(number, end)
            ids += tokens[start:end]
            positions += range(start, end)
            slots += self.slots(number, start, end)
        width = max(len(self.tables[number]) for number in parts)
        tables = [self.tables[number] + [0] * (width - len(self.tables[number])) for number in parts]
        metadata = SimpleNamespace(
            block_tables=torch.tensor(tables),
            context_lens=torch.tensor([start for _, start, _ in parts.values()]),
            seq_lens_tensor=torch.tensor([end for *_, end in parts.values()], dtype=torch.int32),
        )
        rows = (torch.tensor([each + [0] * padding]) for each in (ids, positions))
        return (*rows, torch.tensor(slots + [-1] * padding)), dict(input_metadata=metadata)

    def __call__(self, parts, padding=0, **options):
        """Call the model with `parts` of sequences."""
        values, named = self.arguments(parts, padding)
        return self.model(*values, **named, **options)


def schedule(lengths, seed=0, most=4):
    """Yield the parts of calls until all sequences have these lengths, {number: (start, end)}.

    They are chunks and single tokens of up to `most` sequences at a time, in any order.
    """
    random, done = np.random.default_rng(seed), [0] * len(lengths)
    while left := [number for number, length in enumerate(lengths) if done[number] < length]:
        parts = {}
        for number in random.permutation(left)[: random.integers(2, most + 1)].tolist():
            chunk = int(random.choice([1, 1, 4, 13]))
            end = min(done[number] + chunk, lengths[number])
            parts[number], done[number] = (done[number], end), end
        yield parts
