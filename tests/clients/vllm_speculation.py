"""vLLM's speculative decoding on Neuron (vllm-project/vllm, model_loader/neuron.py NeuronSpeculationCausalLM and
worker/multi_step_neuron_model_runner.py, 2024-11 to 0.9).

FusedSpeculativeDecoder(draft, target, k) over two models that are on the device already, both with continuous batching,
embedding and sampling on the device. One speculative_iteration() per step: prompts, or the last token of every running
request; tokens after a row's count are overwritten with -1, and the scheduler reads columns until all rows are -1.
usage: vllm_speculation.py [MODEL_DIR]
"""
# ruff: noqa: E402

import copy

import _reference as ref
import torch

SEQS, LENGTH, K, TOTAL = 3, 64, 3, 40
path, model = ref.checkpoint("llama", sharp=2e4)
draft_path, draft_model = ref.shorter(model, 2)
lengths = [8, 13, 5, 10, 16]
rows, wants = ref.prompts(model, lengths, TOTAL, gap=40)
# whether the draft would have chosen each token of the continuation
HITS = [
    [i > 0 and best[i - 1] == want[i] for i in range(TOTAL)]
    for want in wants
    for best in [ref.logits(draft_model, want).argmax(-1).tolist()]
]
ref.package()

from transformers_neuronx.config import ContinuousBatchingConfig, GenerationConfig, NeuronConfig
from transformers_neuronx.constants import LAYOUT_BSH
from transformers_neuronx.fused_speculation import FusedSpeculativeDecoder
from transformers_neuronx.llama.model import LlamaForSampling

SAMPLING = GenerationConfig(
    max_length=LENGTH,
    do_sample=True,
    per_batch_line=True,
    top_k=[256] * SEQS,
    top_p=[1.0] * SEQS,
    temperature=[1.0] * SEQS,
    dynamic=True,
    global_top_k=256,
)


class SpeculationCausalLM(torch.nn.Module):
    TERMINATION = -1

    def __init__(self, speculation_model):
        super().__init__()
        self.model = speculation_model

    def forward(self, input_ids, positions, input_block_ids):
        tokens, counts = self.model.speculative_iteration(input_ids, positions, input_block_ids)
        batch_size, steps = tokens.shape
        mask = torch.arange(steps).expand(batch_size, -1) >= counts
        assert torch.equal(tokens == self.model.pad_token_id, mask)  # how AWS's fork finds the end
        tokens[mask] = self.TERMINATION
        return tokens


def load(path):
    config = NeuronConfig(
        collectives_layout=LAYOUT_BSH,
        attention_layout=LAYOUT_BSH,
        fuse_qkv=True,
        on_device_embedding=True,
        continuous_batching=ContinuousBatchingConfig(batch_size_for_shared_caches=SEQS),
        on_device_generation=copy.deepcopy(SAMPLING),
    )
    neuron = LlamaForSampling.from_pretrained(
        path,
        tp_degree=2,
        amp="f32",
        neuron_config=config,
        batch_size=SEQS,
        context_length_estimate=[32],
        n_positions=[LENGTH],
    )
    neuron.to_neuron()
    return neuron.eval()


target, draft = load(path), load(draft_path)
speculator = FusedSpeculativeDecoder(draft, target, K)
speculator.to_neuron()
causal = SpeculationCausalLM(speculator).eval()


@torch.inference_mode()
def step(texts, blocks, prompt):
    """Returns how many tokens each request got."""
    fed = [texts[r] if prompt else texts[r][-1:] for r in blocks]
    positions = [range(len(texts[r]))[-len(ids) :] for r, ids in zip(blocks, fed, strict=True)]
    width = max(map(len, fed))
    ids, at = (torch.tensor([[*xs, *[0] * (width - len(xs))] for xs in some]) for some in (fed, positions))
    tokens = causal(input_ids=ids, positions=at, input_block_ids=torch.tensor(list(blocks.values())))
    assert tokens.shape == (len(blocks), 1 if prompt else K + 1), tokens.shape
    for column in tokens.T.tolist():
        if all(token == -1 for token in column):
            break
        for request, token in zip(blocks, column, strict=True):
            texts[request] += [token] if token != -1 else []
    return (tokens != -1).sum(1).tolist()


texts = [list(row) for row in rows]
free, running, waiting, most = [1, 2, 0], {}, [0, 1, 2, 3, 4], 0
while waiting or running:
    arriving = {request: free.pop(0) for request in waiting[: min(len(free), 2)]}
    waiting, running = waiting[len(arriving) :], {**arriving, **running}
    blocks = arriving or running
    before = {request: len(texts[request]) for request in blocks}
    for (request, n), count in zip(before.items(), step(texts, blocks, bool(arriving)), strict=True):
        if not arriving and n + K < TOTAL:  # as many as the draft gets right, and one
            hits = HITS[request][n : n + K]
            assert count == ([*hits, False].index(False)) + 1, f"request {request} at {n}: {count} tokens, {hits}"
            most = max(most, count)
    for request in [r for r in running if len(texts[r]) >= TOTAL]:
        free.append(running.pop(request))
assert most > 1, "the draft was never right"
ref.same("speculation", [text[:TOTAL] for text in texts], wants)
print("ok")
