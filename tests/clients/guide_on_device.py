"""On-device sampling as the guide shows it (aws-neuron-sdk, transformers-neuronx-developer-guide.rst, 2024).

GenerationConfig inside NeuronConfig: sample() then obeys it and not its own top_k; without eos_token_id nothing ends a
row, whatever the checkpoint says; a call of the model gives tokens [batch, 1]. With dynamic=True and
per_batch_line=True the same object gets other values later and goes to update_generation_config(). usage:
client_guide_on_device.py [MODEL_DIR]
"""
# ruff: noqa: E402

import _reference as ref
import torch

BATCH, LENGTH = 2, 40
path, model = ref.checkpoint("llama")
rows, wants = ref.prompts(model, [9, 9], LENGTH)
end = wants[0][20]
first = wants[0].index(end, 9)
model.config.eos_token_id = model.generation_config.eos_token_id = end
ends_path = ref.scratch()
model.save_pretrained(ends_path)
gpt2_path, gpt2 = ref.checkpoint("gpt2", sharp=2e4)
gpt2_rows, gpt2_wants = ref.prompts(gpt2, [7], LENGTH, gap=60)
ref.package()

from transformers_neuronx import GPT2ForSamplingWithContextBroadcasting, LlamaForSampling
from transformers_neuronx.config import GenerationConfig, NeuronConfig


class Streamer:
    def __init__(self):
        self.columns = []

    def put(self, tokens):
        self.columns.append(tokens.clone())

    def end(self):
        self.columns = torch.cat(self.columns, 1)


def load(folder, generation_config, batch_size=BATCH, kind=LlamaForSampling, **kwargs):
    neuron_config = NeuronConfig(on_device_embedding=True, on_device_generation=generation_config)
    neuron = kind.from_pretrained(folder, batch_size=batch_size, tp_degree=2, amp="f32", n_positions=64,
                                  neuron_config=neuron_config, **kwargs)  # fmt: skip
    neuron.to_neuron()
    return neuron


def among(neuron, row, top):
    """Every new token of the row is one of the reference's likeliest, give or take rounding."""
    scores = ref.logits(model, row)[8:-1]
    chosen = scores.gather(1, torch.tensor(row[9:])[:, None])
    assert (chosen >= scores.topk(top).values[:, -1:] - 1e-4).all(), f"a token outside the best {top}: {row}"


ids = torch.tensor(rows)
ended = [wants[0][: first + 1], wants[1]]
for eos in (None, end, [3, end]):
    streamer = Streamer()
    neuron = load(ends_path, GenerationConfig(max_length=64, top_k=10, do_sample=False, eos_token_id=eos))
    got = neuron.sample(ids, sequence_length=LENGTH, streamer=streamer)
    ref.same(f"streamed, end token {eos}", streamer.columns, got[:, 9:])
    for row, text in zip(got.tolist(), ended if eos else wants, strict=True):
        ref.same(f"end token {eos}", [row[: len(text)]], [text])
    if eos == end and end not in wants[1][9:]:
        assert set(got[0, first:].tolist()) == {end}, f"after the end: {got[0]}"
alone = neuron.sample(ids[:1].repeat(2, 1), sequence_length=LENGTH)
ref.same("all rows end", alone, [ended[0]] * 2)
tokens = neuron(ids)
ref.same("a call", tokens, [[want[9]] for want in wants])
ref.same("a step", neuron(tokens, torch.as_tensor([9])), [[want[10]] for want in wants])

lists = dict(top_k=[1] * BATCH, top_p=[1.0] * BATCH, top_p_min_tokens=[1] * BATCH, temperature=[1.0] * BATCH)
generation_config = GenerationConfig(
    max_length=64, dynamic=True, per_batch_line=True, do_sample=True, global_top_k=256, **lists
)
neuron = load(path, generation_config)
ref.same("top_k of 1", neuron.sample(ids, sequence_length=LENGTH), wants)
generation_config.top_k, generation_config.top_p = [1, 20], [1.0, 0.9]
generation_config.temperature = [1.0, 0.9]
neuron.update_generation_config(generation_config)
drawn = [neuron.sample(ids, sequence_length=LENGTH).tolist() for _ in range(3)]
ref.same("top_k of 1 beside 20", [rows[0] for rows in drawn], [wants[0]] * 3)
assert len({tuple(rows[1]) for rows in drawn}) > 1, "draws repeat"
for got in drawn:
    among(neuron, got[1], 20)
generation_config.top_k = generation_config.global_top_k = 1
neuron.update_generation_config(generation_config)
ref.same("one top_k again", neuron.sample(ids, sequence_length=LENGTH), wants)

sharp = GenerationConfig(max_length=64, top_k=10, top_p=0.9, top_p_min_tokens=1, temperature=0.9, do_sample=True)
neuron = load(gpt2_path, sharp, 1, GPT2ForSamplingWithContextBroadcasting, context_length_estimate=16)
ref.same("GPT-2", neuron.sample(torch.tensor(gpt2_rows), sequence_length=LENGTH), gpt2_wants)
with torch.inference_mode():
    got = neuron.sample(torch.tensor(gpt2_rows), sequence_length=LENGTH, top_k=10)
ref.same("GPT-2, top_k", got, gpt2_wants)
neuron = load(path, GenerationConfig(max_length=64, do_sample=False))
for options in (dict(top_k=50), dict(top_k=50, temperature=9.0)):
    ref.same(f"greedy for all that {options} says", neuron.sample(ids, sequence_length=LENGTH, **options), wants)
print("ok")
