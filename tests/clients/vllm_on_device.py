"""vLLM's Neuron back end with sampling on the device (vllm-project/vllm, worker/neuron_model_runner.py, 2024-11 to
0.9).

NeuronConfig gets a copy of a dynamic GenerationConfig with one top_k, top_p and temperature per cache line; whenever
the requests of a step change, the runner writes their parameters at their block numbers into its own copy and hands
that to update_generation_config(). forward() returns token ids. Temperature 0 becomes top_k 1.
usage: vllm_on_device.py [MODEL_DIR]
"""
# ruff: noqa: E402

import copy

import _reference as ref
import torch

SEQS, LENGTH, TOP_K = 4, 64, 256
path, model = ref.checkpoint("llama")
rows, wants = ref.prompts(model, [5, 16, 9, 12, 7, 10], 30, gap=0.05)
ref.package()

from transformers_neuronx.config import ContinuousBatchingConfig, GenerationConfig, NeuronConfig
from transformers_neuronx.constants import LAYOUT_BSH
from transformers_neuronx.llama.model import LlamaForSampling

# (top_k, top_p, temperature) of each request; only the fifth leaves a choice
ASKED = [(0, 0, 0.0), (TOP_K, 1e-4, 1.0), (3, 1.0, 1e-3), (TOP_K, 1.0, 1e-3), (2, 1.0, 50.0), (1, 0.5, 9.0)]
PARAMETERS = [(1, 1.0, 1.0) if temperature == 0 else (k, p, temperature) for k, p, temperature in ASKED]


class Runner:
    def __init__(self):
        every = dict(top_k=[TOP_K] * SEQS, top_p=[1.0] * SEQS, temperature=[1.0] * SEQS)
        self.sampling = GenerationConfig(
            max_length=LENGTH, do_sample=True, per_batch_line=True, dynamic=True, global_top_k=TOP_K, **every
        )
        config = NeuronConfig(
            collectives_layout=LAYOUT_BSH,
            attention_layout=LAYOUT_BSH,
            fuse_qkv=True,
            quant=None,
            weight_tiling=False,
            continuous_batching=ContinuousBatchingConfig(batch_size_for_shared_caches=SEQS),
            on_device_generation=copy.deepcopy(self.sampling),
        )
        self.model = LlamaForSampling.from_pretrained(
            path,
            tp_degree=2,
            amp="f32",
            neuron_config=config,
            batch_size=SEQS,
            context_length_estimate=[32],
            n_positions=[LENGTH],
        )
        self.model.to_neuron()
        self.previous, self.updates = [], 0

    def update(self, blocks):
        ours, changed = self.sampling, False
        for request, block in blocks.items():
            new = PARAMETERS[request]
            changed |= new != (ours.top_k[block], ours.top_p[block], ours.temperature[block])
            ours.top_k[block], ours.top_p[block], ours.temperature[block] = new
        if changed:
            self.updates += 1
            self.model.update_generation_config(ours)

    @torch.inference_mode()
    def step(self, texts, blocks, prompt):
        """One step of the requests in `blocks`, whose order is that of the batch."""
        if list(blocks) != self.previous:
            self.update(blocks)
            self.previous = list(blocks)
        fed = [texts[r] if prompt else texts[r][-1:] for r in blocks]
        positions = [list(range(len(texts[r])))[-len(ids) :] for r, ids in zip(blocks, fed, strict=True)]
        width = max(map(len, fed))
        ids, positions = (torch.tensor([row + [0] * (width - len(row)) for row in some]) for some in (fed, positions))
        tokens = self.model(ids, cache_ids=positions, start_ids=torch.tensor(list(blocks.values())))
        tokens = tokens.flatten()
        assert len(tokens) == len(blocks), tokens.shape
        for request, token in zip(blocks, tokens, strict=True):
            texts[request].append(token.item())


runner, texts = Runner(), [list(row) for row in rows]
runner.step(texts, {0: 2, 1: 0}, True)
runner.step(texts, {2: 3}, True)
for _ in range(5):
    runner.step(texts, {2: 3, 0: 2, 1: 0}, False)
runner.step(texts, {4: 1, 3: 2}, True)  # request 0 is done, 3 takes over its block
for _ in range(4):
    runner.step(texts, {1: 0, 3: 2, 4: 1, 2: 3}, False)
runner.step(texts, {5: 0}, True)
for _ in range(8):
    runner.step(texts, {5: 0, 4: 1, 3: 2}, False)
assert runner.updates >= 4, runner.updates
for i in (0, 1, 2, 3, 5):
    ref.same(f"request {i}", [texts[i]], [wants[i][: len(texts[i])]])
seconds = 0
for n in range(len(rows[4]), len(texts[4])):  # only the best two, and at this temperature both
    best = ref.logits(model, texts[4][:n])[-1].topk(2).indices.tolist()
    assert texts[4][n] in best, (n, texts[4][n], best)
    seconds += texts[4][n] == best[1]
assert 0 < seconds < 13, f"{seconds} of 13 tokens were the second best"
print("ok")
