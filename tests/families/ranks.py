"""What each process of a world runs: it prints as JSON what models over several devices compute.

python ranks.py DIRECTORY NAME=DEGREE …, with checkpoints in DIRECTORY/NAME
"""

import hashlib
import json
import os
import sys
from pathlib import Path

import pytest
import torch

from transformers_neuronx import Engine, NeuronAutoModelForCausalLM, NeuronAutoModelForSeq2SeqLM
from transformers_neuronx.config import NeuronConfig, QuantizationConfig
from transformers_neuronx.errors import ConfigError
from transformers_neuronx.huggingface.adapter import HuggingFaceGenerationModelAdapter

IDS = torch.arange(3, 19).reshape(2, 8)
INT8 = NeuronConfig(quant=QuantizationConfig(quant_dtype="s8", dequant_dtype="f32"))


def computed(model, directory, degree):
    """Return what one model computes, and the bytes of weights that this process has."""
    found = dict(greedy=model.sample(IDS, 20, top_k=1).tolist())
    found["seeded"] = model.sample(IDS, 20, top_k=20, seed=7).tolist()
    found["unseeded"] = model.sample(IDS, 20, top_k=20, temperature=2.0).tolist()
    if not model.family.encoder:
        found["logits"] = hashlib.sha256(model.forward(IDS).float().numpy().tobytes()).hexdigest()
        adapter = HuggingFaceGenerationModelAdapter(model.config, model)
        how = dict(attention_mask=torch.ones(1, 8), do_sample=False, max_new_tokens=6, pad_token_id=0)
        found["beams"] = adapter.generate(IDS[:1], num_beams=2, **how).tolist()
        if directory.name != "artifact":
            found["bf16"] = opened(directory, degree, amp="bf16").sample(IDS, 20, top_k=1).tolist()
            found["int8"] = opened(directory, degree, neuron_config=INT8).sample(IDS, 20, top_k=1).tolist()
    if "NEURONX_WORLD" in os.environ:
        for refused in (Engine, lambda model: model.save(directory.parent / "refused")):
            with pytest.raises(ConfigError, match="process"):
                refused(model)
    return found | dict(bytes=model.metrics.held.weights)


def opened(directory, degree, ahead=False, **options):
    sizes = dict(n_positions=32, batch_size=2, tp_degree=degree)
    t5 = json.loads((directory / "config.json").read_text())["model_type"] == "t5"
    kind = NeuronAutoModelForSeq2SeqLM if t5 else NeuronAutoModelForCausalLM
    model = kind.from_pretrained(directory, **sizes, **options)
    model.to_neuron(ahead)
    return model


def main():
    directory, *asked = sys.argv[1:]
    results = {}
    for each in asked:
        name, degree = each.split("=")
        place = Path(directory) / name
        results[each] = computed(opened(place, int(degree)), place, int(degree))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
