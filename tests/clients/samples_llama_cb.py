"""Continuous batching by hand, without vLLM (a published walk-through of 2024 with Mistral-7B-Instruct and two slots).

Several prompts in one padded call, steps until a row ends, eviction, a new prompt in its place, and on.

cache_ids are positions times the mask, so pads have position 0; seq_ids are named start_ids; select_tokens() is greedy
by default; rows that have ended are trimmed from later steps. n_positions is a list, so sequences move to a wider
program on the way. usage: client_samples_llama_cb.py [MODEL_DIR]
"""
# ruff: noqa: E402

import _reference as ref
import torch

SEQS, BUCKETS = 3, [16, 32, 64]
path, model = ref.checkpoint("llama")
rows, wants = ref.prompts(model, [6, 11, 9, 13], BUCKETS[-1], gap=1e-2)
end = next(token for i, token in enumerate(wants[1][11:]) if i >= 4 and token not in wants[1][11 : 11 + i])
ref.package()

from transformers_neuronx import GQA, LlamaForSampling
from transformers_neuronx.config import ContinuousBatchingConfig, NeuronConfig
from transformers_neuronx.sampling import select_tokens

continuous_batching = ContinuousBatchingConfig(batch_size_for_shared_caches=SEQS)
neuron_config = NeuronConfig(continuous_batching=continuous_batching, fuse_qkv=True, attention_layout="BSH",
                             collectives_layout="BSH", on_device_embedding=True,
                             group_query_attention=GQA.REPLICATED_HEADS)  # fmt: skip
assert neuron_config.padding_side == "right" and neuron_config.use_2d_cache_ids
neuron = LlamaForSampling.from_pretrained(path, tp_degree=2, amp="f32", neuron_config=neuron_config, batch_size=SEQS,
                                          context_length_estimate=[8, 16], n_positions=BUCKETS)  # fmt: skip
neuron.to_neuron()
texts = {}  # by request: the prompt and what was generated after it
owner = [0, 1, 2]  # by sequence id: the request


def forward(ids, cache_ids, seq_ids):
    """One call, its logits checked row by row. Returns the tokens, s64[rows, 1]."""
    with torch.inference_mode():
        logits = neuron(ids, cache_ids=cache_ids, start_ids=seq_ids)
    requests = [owner[seq] for seq in seq_ids.tolist()]
    ref.close(f"requests {requests}", logits, torch.stack([ref.logits(model, texts[r])[-1] for r in requests]))
    tokens = select_tokens(logits)
    for request, token in zip(requests, tokens.flatten().tolist(), strict=True):
        texts[request].append(token)
    return tokens


def encode(requests, seq_ids):
    texts.update((request, list(rows[request])) for request in requests)
    ids, mask = ref.padded([rows[request] for request in requests], "right", pad=0)
    cache_ids = torch.arange(ids.shape[1]).reshape(1, -1).expand(len(ids), -1).mul(mask)
    return forward(ids, cache_ids, seq_ids), cache_ids.max(dim=1, keepdim=True).values


seq_ids = torch.arange(SEQS)
next_tokens, cache_ids = encode([0, 1, 2], seq_ids)
while not torch.any(next_tokens == end):
    cache_ids = cache_ids + 1
    next_tokens = forward(next_tokens, cache_ids, seq_ids)
finished = torch.concat(torch.where(next_tokens.flatten() == end))
assert finished.tolist() == [1], "another row has ended"
owner[1] = 3
new_tokens, new_cache_ids = encode([3], finished)
next_tokens[finished], cache_ids[finished] = new_tokens, new_cache_ids
limits = torch.tensor([40, BUCKETS[-1], 64])  # row 0 ends before the others
while True:
    (going,) = torch.where(cache_ids.flatten() + 2 < limits[seq_ids])
    if len(going) == 0:
        break
    next_tokens, cache_ids, seq_ids = next_tokens[going], cache_ids[going] + 1, seq_ids[going]
    next_tokens = forward(next_tokens, cache_ids, seq_ids)
wants[0], wants[1] = wants[0][:40], wants[1][: wants[1].index(end, 11) + 1]
ref.same("texts", [texts[request] for request in range(4)], wants)
print("ok")
