"""Loading holds the weights once, and no more than two of them besides, as they were saved or as they are held."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

LOADED = """
import json, sys
from transformers_neuronx.config import NeuronConfig, QuantizationConfig
from transformers_neuronx.decoder import Decoder
from transformers_neuronx.llama.model import LlamaForSampling
from transformers_neuronx.runtimes import get_runtime

directory, amp, quant, degree = sys.argv[1:]
quant = QuantizationConfig(quant) if quant else None
model = LlamaForSampling.from_pretrained(
    directory, n_positions=[8], amp=amp, tp_degree=int(degree), neuron_config=NeuronConfig(quant=quant)
)
decoder = Decoder(model.family, model.config, get_runtime("cpu", int(degree)), model.options)
def memory(kind):
    [line] = [line for line in open("/proc/self/status") if line.startswith(kind)]
    return int(line.split()[1]) * 1024
weights = list(decoder.read(model._checkpoint))
decoder.take(weight for weight in weights if weight.keys[0][0] == 0)  # a layer: what code and threads take is not meant
decoder.weights.clear()
before = memory("VmRSS")
decoder.take(weights)
tensors = {id(tensor): tensor for tensor in decoder.weights.values()}.values()
sizes = sorted(sum(array.nbytes for array in tensor.arrays) for tensor in tensors)
saved = sorted(model._checkpoint.read(name).nbytes for name in model._checkpoint)
print(json.dumps(dict(peak=memory("VmHWM") - before, resident=sum(sizes), two=max(sum(sizes[-2:]), sum(saved[-2:])))))
"""


@pytest.fixture(scope="module", params=["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def checkpoint(request, tmp_path_factory):
    sizes = dict(
        vocab_size=24000, hidden_size=1024, intermediate_size=3072, num_hidden_layers=4, num_attention_heads=16
    )
    config = LlamaConfig(**sizes, num_key_value_heads=4, dtype=request.param)
    directory = tmp_path_factory.mktemp(request.param)
    LlamaForCausalLM(config).to(getattr(torch, request.param)).save_pretrained(directory)
    return directory


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="wants /proc, which says a process's peak memory")
@pytest.mark.parametrize(("amp", "quant", "degree"), [("f32", "", 2), ("bf16", "s8", 1)])
def test_peak_memory_while_loading(checkpoint, amp, quant, degree):
    command = [sys.executable, "-c", LOADED, checkpoint, amp, quant, str(degree)]
    # What was freed is given back at once, or it counts what the heaps of threads keep for themselves.
    heap = dict(MALLOC_ARENA_MAX="1", MALLOC_MMAP_THRESHOLD_="65536", MALLOC_TRIM_THRESHOLD_="65536")
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ | heap)
    assert result.returncode == 0, result.stderr
    memory = json.loads(result.stdout)
    print(f"peak {memory['peak'] / memory['resident']:.2f} of the weights on the devices")
    assert memory["peak"] <= memory["resident"] + memory["two"]  # less where weights stay in their file until used
