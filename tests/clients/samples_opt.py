"""facebook/opt notebooks and their NeuronPerf script (aws-neuron-samples, facebook-opt-13b-sampling.ipynb, 2023).

Hugging Face's own from_pretrained and the library's get low_cpu_mem_usage=True; a callback casts the blocks one by one
and leaves the layer norms. amp is "f16", or None, which means the checkpoint's own type; options may come by position.
In the script the model is a submodule that gets single rows and concatenates them. usage: client_samples_opt.py
[MODEL_DIR]
"""
# ruff: noqa: E402

import copy
import os

import _reference as ref
import torch
import transformers

BATCH, LENGTH = 2, 48
path, _ = ref.checkpoint("opt", sharp=1e3)
hf_model = transformers.OPTForCausalLM.from_pretrained(path, low_cpu_mem_usage=True)


def amp_callback(model, dtype):
    # attention and the two linears of each block; the head is tied to the embedding, which follows
    for block in model.model.decoder.layers:
        block.self_attn.to(dtype)
        block.fc1.to(dtype)
        block.fc2.to(dtype)
    model.lm_head.to(dtype)


cast = copy.deepcopy(hf_model)
amp_callback(cast, torch.float16)
first = cast.model.decoder.layers[0]
assert first.self_attn_layer_norm.weight.dtype == torch.float32 and first.fc1.bias.dtype == torch.float16
model = copy.deepcopy(hf_model)
model.load_state_dict(cast.state_dict())  # the rounded weights in f32
rows, wants = ref.prompts(model, [8, 8], LENGTH, gap=30)
wide = copy.deepcopy(hf_model).to(torch.bfloat16)
exact = copy.deepcopy(wide).float()
known = (("f16", model), ("bf16", exact), (None, hf_model))
steps = {name: torch.stack([ref.logits(some, row)[-1] for row in rows]) for name, some in known}
ref.package()

from transformers_neuronx.module import save_pretrained_split
from transformers_neuronx.opt.model import OPTForSampling

os.chdir(ref.scratch())
save_pretrained_split(cast, "./opt-13b-split")
save_pretrained_split(copy.deepcopy(model).half(), "./opt-half-split")
save_pretrained_split(wide, "./opt-wide-split")
save_pretrained_split(hf_model, "./opt-f32-split")


class Wrapper(torch.nn.Module):
    def __init__(self, filename, *options, **named):
        super().__init__()
        self.neuron_model = OPTForSampling.from_pretrained(filename, *options, **named)
        self.neuron_model.to_neuron()

    def forward(self, *inputs):
        return self.neuron_model.sample(torch.concat(inputs), sequence_length=LENGTH)


inputs = [torch.tensor([row]) for row in rows]
cases = {
    "f16": ("./opt-13b-split", {"amp": "f16", "low_cpu_mem_usage": True}, "f16", 1e-2),
    "None, halves": ("./opt-half-split", {"amp": None}, "f16", 1e-2),
    "not given, halves": ("./opt-half-split", {}, "f16", 1e-2),
    "None, bf16": ("./opt-wide-split", {"amp": None}, "bf16", 6e-2),
    "f32": ("./opt-13b-split", {"amp": "f32"}, "f16", 1e-5),
    "None, f32": ("./opt-f32-split", {"amp": None}, None, 1e-5),
}
for name, (folder, options, reference, tolerance) in cases.items():
    wrapper = Wrapper(folder, batch_size=BATCH, tp_degree=2, n_positions=LENGTH, **options)
    want = steps[reference]
    logits = wrapper.neuron_model(torch.tensor(rows))
    ref.close(f"amp {name}", logits, want, tolerance)
    coarse = (logits - want).abs().max() / want.abs().max() > 1e-5
    assert coarse == (tolerance > 1e-5), f"amp {name} was not computed in that type"
    with torch.inference_mode():
        got = wrapper(*inputs)
    if reference == "f16":
        ref.same(f"amp {name}", got, wants)
by_position = Wrapper("./opt-13b-split", BATCH, "f16", 2, LENGTH, None, 16)
ref.same("by position", by_position(*inputs), wants)
print("ok")
