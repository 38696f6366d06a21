"""Speculative decoding, all of it (aws-neuron-sdk's guide and the original's own docstrings, 2024).

Several speculation lengths before to_neuron(), keys (length, batch size), speculative_forward() by hand with logits
[length, vocab, batch]; SpeculativeGenerator for two rows padded right, whose continuations begin where each prompt
ends and overwrite its pads; FusedSpeculativeDecoder, to_neuron() and sample(ids, sequence_length=). usage:
client_guide_speculation.py [MODEL_DIR]
"""
# ruff: noqa: E402

import _reference as ref
import torch

LENGTH = 44
path, model = ref.checkpoint("llama", sharp=2e4)
draft_path, _ = ref.shorter(model, 2)
rows, wants = ref.prompts(model, [9, 14], LENGTH, gap=40)
ref.package()

from transformers_neuronx import GenerationConfig, LlamaForSampling, NeuronConfig
from transformers_neuronx.fused_speculation import FusedSpeculativeDecoder
from transformers_neuronx.speculation import SpeculativeGenerator


class Streamer:
    def __init__(self):
        self.got, self.ends = [], 0

    def put(self, tokens):
        self.got.append(tokens)

    def end(self):
        self.ends += 1


def load(folder, batch_size=1, speculate=None, **options):
    neuron = LlamaForSampling.from_pretrained(folder, batch_size=batch_size, n_positions=64, tp_degree=2, amp="f32",
                                              neuron_config=NeuronConfig(**options))  # fmt: skip
    if speculate:
        neuron.enable_speculative_decoder(*speculate)
    neuron.to_neuron()
    return neuron


target = load(path, speculate=([4, 5], [1]))
assert sorted(target.decoder_lm_head_for_speculation.keys()) == [(4, 1), (5, 1)]
row, want = rows[0], wants[0]
for length in (4, 5, 4):
    target(torch.tensor([row]))
    at = 9
    for _ in range(3):  # half of each guess is wrong, and the next call writes over it
        guess = want[at : at + 2] + [7, 11, 13][: length - 2]
        cache_ids = torch.arange(at, at + length)
        logits = target.speculative_forward(torch.tensor([guess]), cache_ids, None, length)
        reference = ref.logits(model, [*want[:at], *guess])[-length:]
        ref.close(f"{length} tokens at {at}", logits, reference[:, :, None])
        at += 2
    token = target(torch.tensor([want[at : at + 1]]), torch.as_tensor([at])).argmax(1)
    assert token == want[at + 1], f"the token after {length} at a time"

draft = load(draft_path)
for k in (4, 5):
    generator = SpeculativeGenerator(draft, target, k)
    for row, want in zip(rows, wants, strict=True):
        streamer = Streamer()
        response = generator.sample(input_ids=torch.tensor([row]), sequence_length=LENGTH, streamer=streamer)
        ref.same(f"alone, k={k}", response, [want])
        ref.same("the streamed prompt", streamer.got[0], [row])
        assert streamer.ends == 1

fused = dict(on_device_embedding=True, on_device_generation=GenerationConfig(do_sample=False))
draft, target = load(draft_path, **fused), load(path, **fused)
fsd = FusedSpeculativeDecoder(draft, target, 5)
fsd.to_neuron()
for row, want in zip(rows, wants, strict=True):
    ref.same("fused", fsd.sample(torch.tensor([row]), sequence_length=LENGTH), [want])
end = next(token for i, token in enumerate(wants[0]) if i > 20 and token not in wants[0][:i])
fsd = FusedSpeculativeDecoder(draft, target, 3, eos_token_id=end)
fsd.to_neuron()
response = fsd.sample(torch.tensor(rows[:1]), sequence_length=LENGTH)
ref.same("fused, to an end", response, [wants[0][: wants[0].index(end) + 1]])

ids, mask = ref.padded(rows, "right", pad=0)
draft, target = load(draft_path, 2, padding_side="right"), load(path, 2, [5], padding_side="right")
generator = SpeculativeGenerator(draft, target, 5)
for _ in range(2):
    response = generator.sample(input_ids=ids, attention_mask=mask, sequence_length=LENGTH)
    ref.same("two rows", response, wants)
draft, target = (load(folder, 2, padding_side="right", **fused) for folder in (draft_path, path))
fsd = FusedSpeculativeDecoder(draft, target, 4)
fsd.to_neuron()
ref.same("two rows, fused", fsd.sample(ids, attention_mask=mask, sequence_length=LENGTH), wants)
print("ok")
