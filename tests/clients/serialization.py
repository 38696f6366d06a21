"""Saving and loading (the guide's chapter; Llama-3 notebooks of aws-neuron-samples; DJL's handlers, 2023-24).

save() and load() for five families, with presharded weights or without, from another working directory, after
cpu_compile() on a machine for that; a directory for compiled artifacts that is empty at the first start; save_split by
hand; what was saved for other sizes is refused, and a missing directory too. usage: client_serialization.py
[MODEL_DIR]
"""
# ruff: noqa: E402

import os

import _reference as ref
import torch

LENGTH = 24
BY_ORDER = ("gpt2", "opt", "bloom", "llama", "mistral")
material = {}
for family in BY_ORDER:
    path, model = ref.checkpoint(family, sharp=2e4)
    material[family] = (path, model, *ref.prompts(model, [6, 6], LENGTH, gap=40))
ref.package()

from transformers_neuronx import BloomForSampling, LlamaForSampling, MistralForSampling, NeuronConfig, OPTForSampling
from transformers_neuronx.gpt2.model import GPT2ForSampling
from transformers_neuronx.module import save_pretrained_split, save_split

KINDS = dict(zip(BY_ORDER, (GPT2ForSampling, OPTForSampling, BloomForSampling, LlamaForSampling, MistralForSampling),
                 strict=True))  # fmt: skip
work, elsewhere = ref.scratch(), ref.scratch()
os.chdir(work)


def make(family, folder=None, **changes):
    options = {"batch_size": 2, "tp_degree": 2, "n_positions": 32, "amp": "f32", "unroll": None, **changes}
    config = NeuronConfig(on_device_embedding=True)
    return KINDS[family].from_pretrained(folder or material[family][0], neuron_config=config, **options)


def check(what, neuron, family):
    _, model, rows, wants = material[family]
    ref.close(what, neuron(torch.tensor(rows)), torch.stack([ref.logits(model, row)[-1] for row in rows]))
    ref.same(what, neuron.sample(torch.tensor(rows), sequence_length=LENGTH, start_ids=None), wants)


for family in KINDS:
    neuron = make(family)
    assert not neuron.is_compiled()
    neuron.to_neuron()
    neuron.save(f"./{family}-artifacts")
    neuron.save(f"{family}-presharded", sharded_weights=True)
    assert neuron.is_compiled() and os.listdir(f"{family}-artifacts")
    check(f"{family}, that was saved", neuron, family)
    del neuron
    neuron = make(family)
    neuron.load(os.path.join(work, f"{family}-artifacts"))
    os.chdir(elsewhere)  # as DJL does before it compiles
    neuron.to_neuron()
    check(f"{family}, loaded", neuron, family)
    neuron = make(family, os.path.join(work, f"{family}-presharded"))
    neuron.load(os.path.join(work, f"{family}-presharded"))
    neuron.to_neuron()
    check(f"{family}, presharded", neuron, family)
    os.chdir(work)

neuron = make("llama")
neuron.cpu_compile()
neuron.save("compiled-ahead")
neuron = make("llama")
neuron.load("compiled-ahead")
neuron.to_neuron()
check("compiled ahead", neuron, "llama")

try:
    make("gpt2")._load_compiled_artifacts("no-such-directory")
    raise SystemExit("a missing directory was accepted")
except FileNotFoundError:
    pass
for changes in (dict(n_positions=64), dict(batch_size=1), dict(tp_degree=1), dict(amp="bf16")):
    neuron = make("llama", **changes)
    try:
        neuron.load("llama-artifacts")
        neuron.to_neuron()
    except (FileNotFoundError, ValueError):
        continue
    raise SystemExit(f"programs for other sizes were accepted: {changes}")
split = {"first": os.path.join(work, "gpt2-split"), "second": os.path.join(work, "gpt2-by-hand")}
model = material["gpt2"][1]
save_pretrained_split(model, split["first"])
model.config.save_pretrained(split["second"])
save_split(model.state_dict(), os.path.join(split["second"], "pytorch_model.bin"))
os.mkdir("neuron-cache")
for folder in split.values():
    for time in ("first start", "second start"):
        neuron = make("gpt2", folder)
        neuron._load_compiled_artifacts("neuron-cache")  # empty at first: then to_neuron() compiles
        neuron.to_neuron()
        neuron._save_compiled_artifacts("neuron-cache")
        check(f"{folder}, {time}", neuron, "gpt2")
print("ok")
