"""Loading holds the weights once, plus at most two of them, and keeps nothing of an earlier model."""

import gc
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
)

from transformers_neuronx.engine.encoding import EncodeKey
from transformers_neuronx.gpt2.model import GPT2ForSampling
from transformers_neuronx.runtimes import kernels
from transformers_neuronx.serving.steps import CopyKey
from transformers_neuronx.t5.model import T5ForSampling

pytestmark = pytest.mark.compiled_ahead

LOADED = """
import json, sys
from transformers_neuronx.config import NeuronConfig, QuantizationConfig
from transformers_neuronx.serving.paged_slots import PagedDecoder
from transformers_neuronx.llama.model import LlamaForSampling
from transformers_neuronx.runtimes import get_runtime

directory, amp, quant, degree = sys.argv[1:]
quant = QuantizationConfig(quant) if quant else None
model = LlamaForSampling.from_pretrained(
    directory, n_positions=[8], amp=amp, tp_degree=int(degree), neuron_config=NeuronConfig(quant=quant)
)
decoder = PagedDecoder(model.family, model.model_config, get_runtime("cpu", int(degree)), model.options)
def memory(kind):
    [line] = [line for line in open("/proc/self/status") if line.startswith(kind)]
    return int(line.split()[1]) * 1024
weights = list(decoder.read(model.checkpoint))
decoder.take(weight for weight in weights if weight.keys[0][0] == 0)  # a layer: what code and threads take is not meant
decoder.weights.clear()
before = memory("VmRSS")
decoder.take(weights)
tensors = {id(tensor): tensor for tensor in decoder.weights.values()}.values()
sizes = sorted(tensor.nbytes for tensor in tensors)
saved = sorted(model.checkpoint.read(name).nbytes for name in model.checkpoint)
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


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc, which has a process's peak memory")
@pytest.mark.parametrize(("amp", "quant", "degree"), [("f32", "", 2), ("bf16", "s8", 1)])
@pytest.mark.slow
def test_peak_memory_while_loading(checkpoint, amp, quant, degree):
    command = [sys.executable, "-c", LOADED, checkpoint, amp, quant, str(degree)]
    # Free memory is returned at once; otherwise the heaps of threads would be counted.
    heap = dict(MALLOC_ARENA_MAX="1", MALLOC_MMAP_THRESHOLD_="65536", MALLOC_TRIM_THRESHOLD_="65536")
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ | heap)
    assert result.returncode == 0, result.stderr
    memory = json.loads(result.stdout)
    print(f"peak {memory['peak'] / memory['resident']:.2f} of the weights on the devices")
    assert memory["peak"] <= memory["resident"] + memory["two"]  # less if weights stay in their file until used


# Memory of an earlier model.


@pytest.fixture
def uncollected():
    """Turn off the garbage collector: what a cycle or an engine keeps then stays."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    """An artifact with weights, which are used in place in its files."""
    torch.manual_seed(0)
    sizes = dict(n_layer=2, n_embd=16, n_head=2, n_positions=16, vocab_size=41)
    directory = tmp_path_factory.mktemp("artifact")
    GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).save_pretrained(directory / "checkpoint")
    model = GPT2ForSampling.from_pretrained(directory / "checkpoint")
    model.to_neuron()
    model.save(directory / "saved", sharded_weights=True)
    return directory / "saved"


def parts(model):
    """Objects that must be freed when a model leaves the devices."""
    decoder = model.decoder
    executables = [program.executable for program in decoder.store.stored.values()]
    assert executables and decoder.weights and decoder.caches
    return [weakref.ref(part) for part in (decoder, *executables, *decoder.weights.values(), *decoder.caches)]


def mapped(directory):
    """Count the mappings of files in a directory, from /proc."""
    return Path("/proc/self/maps").read_text().count(str(directory))


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc, which lists mapped files")
def test_of_what_was_on_the_devices_nothing_is_kept(artifact, uncollected):
    model = GPT2ForSampling.from_pretrained(artifact)
    model.to_neuron()
    once, before = mapped(artifact), parts(model)
    assert once == len(list(artifact.glob("weights-*")))
    for _ in range(3):
        model.to_neuron()
        assert not [part for part in before if part() is not None]
        assert mapped(artifact) == once
        before = parts(model)
        model.sample(torch.ones(1, 4, dtype=torch.long), 12, top_k=1)
    del model
    assert not [part for part in before if part() is not None]
    assert mapped(artifact) == 0


@pytest.fixture
def unreachable(uncollected):
    """The kinds of objects of this package that only the collector could have freed."""
    gc.set_debug(gc.DEBUG_SAVEALL)

    def found():
        gc.collect()
        kinds = {f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.garbage}
        return sorted(kind for kind in kinds if kind.startswith("transformers_neuronx."))

    yield found
    gc.set_debug(0)
    gc.garbage.clear()


def test_nothing_waits_for_the_collector(artifact, unreachable):
    """Graphs once did, and they hold each instruction: megabytes for many layers at every to_neuron()."""
    model = GPT2ForSampling.from_pretrained(artifact.parent / "checkpoint")
    model.to_neuron()
    model.sample(torch.ones(1, 4, dtype=torch.long), 12, top_k=1)
    model.reorder_cache([0])
    assert unreachable() == []
    del model
    assert unreachable() == []


EXIT = """
import sys
from transformers_neuronx.gpt2.model import GPT2ForSampling
model = GPT2ForSampling.from_pretrained(sys.argv[1])
model.to_neuron()
"""


def test_a_process_ends_quietly_with_a_model_in_it(artifact):
    result = subprocess.run([sys.executable, "-c", EXIT, artifact], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.skipif(kernels.level() == "off", reason="without kernels XLA copies the cache: they need a C++ compiler")
@pytest.mark.parametrize("amp", ["f32", "bf16"])
def test_a_page_that_is_copied_and_a_source_that_is_kept_copy_nothing_else(amp, tmp_path):
    """XLA would convert a whole cache of 16 bits for it."""
    sizes = dict(vocab_size=40, d_model=32, d_kv=16, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    AutoModelForSeq2SeqLM.from_config(T5Config(**sizes)).save_pretrained(tmp_path)
    model = T5ForSampling.from_pretrained(
        tmp_path, n_positions=512, context_length_estimate=[64], batch_size=128, amp=amp
    )
    model.to_neuron(ahead=False)
    decoder = model.decoder
    for key, held in [(CopyKey(), decoder.caches), (EncodeKey(1, 64), decoder.memory.arrays)]:
        [(_, program)] = decoder.store.parts(key)
        assert program.memory().temporaries < sum(each.nbytes for each in held) / 4, key
