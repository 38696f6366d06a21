"""GPT-J notebooks of 2023 (aws-neuron/aws-neuron-samples, gpt-j-6b-sampling.ipynb and gpt-j-dp.py).

A callback casts attention, MLP and head to half precision and leaves the norms; the split checkpoint is read with
amp="f16". A warm-up up to n_positions comes first, and results have sequence_length columns. A row ends at its end
token, which the original never sampled in these classes. Options by position, no context buckets, top_k as the fourth
argument. usage: client_samples_gptj_2023.py [MODEL_DIR]
"""
# ruff: noqa: E402

import copy
import os

import _reference as ref
import torch

BATCH, LENGTH = 2, 64
_, model = ref.checkpoint("gptj", sharp=2e4)
rows, wants = ref.prompts(model, [7, 7], LENGTH, gap=25)
_, half = ref.checkpoint("gptj", sharp=2e3)
_, pythia = ref.checkpoint("gpt_neox", sharp=2e4)
pythia_rows, pythia_wants = ref.prompts(pythia, [11, 11], LENGTH, gap=25)


def amp_callback(some, dtype):
    for block in some.transformer.h:
        block.attn.to(dtype)
        block.mlp.to(dtype)
    some.lm_head.to(dtype)


cast = copy.deepcopy(half)
amp_callback(cast, torch.float16)
assert cast.transformer.ln_f.weight.dtype == torch.float32
half.load_state_dict(cast.state_dict())  # the same rounded weights in f32
half_rows, half_wants = ref.prompts(half, [9], 40, gap=60)
endless = copy.deepcopy(pythia.config)
endless.eos_token_id = pythia_wants[0][20]
ended = [pythia_wants[0][: pythia_wants[0].index(endless.eos_token_id, 11) + 1]]
ref.package()

from transformers_neuronx.gptj.model import GPTJForSampling
from transformers_neuronx.gptneox.model import GPTNeoXForSampling
from transformers_neuronx.module import save_pretrained_split

os.chdir(ref.scratch())
os.environ["NEURON_CC_FLAGS"] = "--model-type=transformer-inference"
save_pretrained_split(cast, "./gptj-6b-split")
neuron = GPTJForSampling.from_pretrained("./gptj-6b-split", n_positions=LENGTH, batch_size=1, tp_degree=2, amp="f16")
neuron.to_neuron()
with torch.inference_mode():
    neuron.sample(torch.as_tensor(half_rows), sequence_length=LENGTH)  # warm up
    ref.same("f16", neuron.sample(torch.as_tensor(half_rows), sequence_length=40), half_wants)

save_pretrained_split(model, "./gptj-split")
neuron = GPTJForSampling.from_pretrained("./gptj-split", BATCH, "f32", 2, None, n_positions=LENGTH)
neuron.to_neuron()
ids = torch.as_tensor(rows)
with torch.inference_mode():
    for length in (LENGTH, 8, 33, LENGTH):
        ref.same(f"length {length}", neuron.sample(ids, sequence_length=length), [want[:length] for want in wants])
    ref.same("by position", neuron.sample(ids, 20, None, 1), [want[:20] for want in wants])
    logits = neuron(ids, torch.arange(7, dtype=torch.int32))
    ref.close("logits", logits, torch.stack([ref.logits(model, row)[-1] for row in rows]))
    logits = neuron(torch.tensor([want[7:8] for want in wants]), torch.as_tensor([7], dtype=torch.int32))
    ref.close("logits of a step", logits, torch.stack([ref.logits(model, want[:8])[-1] for want in wants]))

for config, ids, want in ((pythia.config, pythia_rows, pythia_wants), (endless, pythia_rows[:1], ended)):
    pythia.config.eos_token_id = pythia.generation_config.eos_token_id = config.eos_token_id
    save_pretrained_split(pythia, f"./pythia-{config.eos_token_id}-split")
    neuron = GPTNeoXForSampling.from_pretrained(f"./pythia-{config.eos_token_id}-split", batch_size=BATCH, tp_degree=2,
                                                n_positions=LENGTH, amp="f32", unroll=1)  # fmt: skip
    neuron.to_neuron()
    for length in (LENGTH, 12, 40):
        got = neuron.sample(torch.as_tensor(ids), sequence_length=length, top_k=50)
        ref.same(f"GPT-NeoX, end token {config.eos_token_id}, length {length}", got, [row[:length] for row in want])
print("ok")
