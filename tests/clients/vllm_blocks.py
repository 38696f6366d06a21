"""A scheduler like vLLM's over a paged cache, with the arguments that the original's models read (its base.py, 0.13).

The cache engine is set up before the model is made. Tensors of a step are int32. Tokens of all sequences stand in one
row, slots are block * block_size + offset, and block tables are padded with 0 to the longest. With chunked prefill a
token budget is shared by running rows and chunks, and the first rows of the logits are taken. Without it prompts have
steps of their own. Blocks of requests that ended are used again, in any order. usage: vllm_blocks.py [MODEL_DIR]
"""
# ruff: noqa: E402

from types import SimpleNamespace

import _reference as ref
import torch

SEQS, LENGTH, SIZE, BLOCKS, BUDGET = 3, 64, 16, 10, 24
path, model = ref.checkpoint("llama")
lengths, news = [5, 34, 9, 20, 47, 7], [9, 6, 12, 5, 8, 4]
rows, wants = ref.prompts(model, lengths, 60)
ref.package()

from transformers_neuronx.config import ContinuousBatchingConfig, NeuronConfig
from transformers_neuronx.constants import Layout
from transformers_neuronx.llama.model import LlamaForSampling


class Scheduled(SimpleNamespace):
    """A request: its tokens so far, how many of them are in the cache, and its blocks."""

    def grow(self, free, end):
        while len(self.table) * SIZE < end:
            self.table.append(free.pop(0))

    def slots(self, start, end):
        return [self.table[at // SIZE] * SIZE + at % SIZE for at in range(start, end)]


def engine(chunked):
    batching = ContinuousBatchingConfig(
        max_num_seqs=SEQS, max_model_len=LENGTH, optimized_paged_attention=True, enable_chunked_prefill=chunked
    )
    batching.init_cache_engine(block_size=SIZE, num_blocks=BLOCKS)
    config = NeuronConfig(
        continuous_batching=batching, attention_layout=Layout.BSH, cache_layout=Layout.BSH, padding_side="right",
        collectives_layout=Layout.BSH, fuse_qkv=True, on_device_embedding=True, sequence_parallel_norm=False,
    )  # fmt: skip
    assert config.paged_attention and config.optimized_paged_attention and config.enable_chunked_prefill == chunked
    loaded = LlamaForSampling.from_pretrained(
        path, tp_degree=2, amp="f32", neuron_config=config, batch_size=SEQS, n_positions=[LENGTH],
        context_length_estimate=[BUDGET, LENGTH],
    )  # fmt: skip
    loaded.to_neuron()
    return loaded


def ints(values):
    return torch.tensor(values, dtype=torch.int32)


def tables(step):
    width = max(len(request.table) for request, _ in step)
    return ints([request.table + [0] * (width - len(request.table)) for request, _ in step])


def side_by_side(step):
    """ids [1, n], positions [1, n], slots [n] of (request, number of tokens)."""
    ids, positions, slots = [], [], []
    for request, count in step:
        start, end = request.computed, request.computed + count
        ids += request.tokens[start:end]
        positions += range(start, end)
        slots += request.slots(start, end)
    return ints([ids]), ints([positions]), ints(slots)


def forward(loaded, step, chunked, prompt):
    if not chunked and not prompt:
        ids, positions = (ints([[value] for value in each]) for each in zip(
            *((request.tokens[-1], request.computed) for request, _ in step), strict=True))  # fmt: skip
        slots = ints([request.slots(request.computed, request.computed + 1)[0] for request, _ in step])
        metadata = SimpleNamespace(is_prompt=False, block_tables=tables(step), context_lens=positions[:, 0] + 1)
        return loaded(ids, cache_ids=positions, start_ids=slots, input_metadata=metadata)
    ids, positions, slots = side_by_side(step)
    starts, counts = (ints(each) for each in zip(*((r.computed, count) for r, count in step), strict=True))
    metadata = SimpleNamespace(is_prompt=True, num_prefills=len(step), prompt_lens_tensor=counts)
    if chunked:
        metadata = SimpleNamespace(block_tables=tables(step), context_lens=starts, seq_lens_tensor=starts + counts)
    return loaded(ids, cache_ids=positions, start_ids=slots, input_metadata=metadata)


def planned(running, waiting, free, chunked):
    """The next step: running rows first, then prompts as far as rows, blocks and tokens last."""
    step, budget = [], BUDGET
    if chunked:
        step = [(r, 1) for r in running if len(r.tokens) - r.computed == 1]
        budget -= len(step)
        for request in running:
            missing = len(request.tokens) - request.computed
            if missing > 1 and budget:
                step.append((request, min(missing, budget)))
                budget -= step[-1][1]
    room = len(free)
    while waiting and len(running) < SEQS and (budget or not chunked):
        needed = -(-(len(waiting[0].tokens) + waiting[0].wanted) // SIZE)
        if needed > room - sum(r.reserved - len(r.table) for r in running):
            break
        request = waiting.pop(0)
        request.reserved, count = needed, len(request.tokens)
        running.append(request)
        step.append((request, min(count, budget) if chunked else count))
        budget -= step[-1][1]
    return step or [(request, 1) for request in running[::-1]]


@torch.inference_mode()
def serve(chunked):
    loaded, free = engine(chunked), [4, 0, 9, 2, 7, 1, 8, 3, 6, 5]
    waiting = [
        Scheduled(number=i, tokens=list(row), computed=0, table=[], wanted=new, reserved=0)
        for i, (row, new) in enumerate(zip(rows, news, strict=True))
    ]
    everything, running, mixed = list(waiting), [], 0
    while waiting or running:
        step = planned(running, waiting, free, chunked)
        mixed += len({count > 1 for _, count in step}) == 2
        for request, count in step:
            request.grow(free, request.computed + count)
        logits = forward(loaded, step, chunked, prompt=step[0][1] > 1)
        assert logits.shape == (SEQS if chunked else len(step), model.config.vocab_size), logits.shape
        for (request, count), token in zip(step, logits[: len(step)].argmax(-1).tolist(), strict=True):
            request.computed += count
            if request.computed == len(request.tokens):
                request.tokens.append(token)
            if len(request.tokens) == lengths[request.number] + request.wanted:
                running.remove(request)
                free += request.table[::-1]
    assert sorted(free) == list(range(BLOCKS)) and bool(mixed) == chunked
    return [request.tokens for request in everything]


for chunked in (True, False):
    want = [row[: n + k] for row, n, k in zip(wants, lengths, news, strict=True)]
    ref.same(f"chunked prefill {chunked}", serve(chunked), want)
print("ok")
