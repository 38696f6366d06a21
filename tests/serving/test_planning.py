"""A plan for the CPU agrees with the memory of devices and of the process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
    T5Config,
    T5ForConditionalGeneration,
)

from transformers_neuronx.analysis.planning import Place, Planner
from transformers_neuronx.analysis.planning.places import Core
from transformers_neuronx.config import NeuronConfig, QuantizationConfig
from transformers_neuronx.huggingface.auto import family_of
from transformers_neuronx.runtimes import get_runtime
from transformers_neuronx.weights.directories import load_config

pytestmark = pytest.mark.compiled_ahead

TINY_KJV = Path(__file__).parents[2] / "examples" / "tiny-kjv"
CLOSE = 0.05

# For each: a configuration at two sizes, and its options.
SMALL = dict(vocab_size=301, max_position_embeddings=64, hidden_size=64, intermediate_size=172, num_hidden_layers=2)
HEADS = dict(num_attention_heads=8, num_key_value_heads=2)
WIDE = dict(vocab_size=16000, max_position_embeddings=256)
MODELS = {
    "gpt2, f32, tp 2": (
        GPT2Config(vocab_size=301, n_positions=64, n_embd=48, n_layer=2, n_head=6, bos_token_id=0, eos_token_id=0),
        GPT2Config(vocab_size=16000, n_positions=256, n_embd=960, n_layer=4, n_head=15, bos_token_id=0, eos_token_id=0),
        dict(amp="f32", tp_degree=2),
    ),
    "llama, bf16": (
        LlamaConfig(**SMALL, **HEADS),
        LlamaConfig(**WIDE, hidden_size=1024, intermediate_size=3072, num_hidden_layers=6, **HEADS),
        dict(amp="bf16"),
    ),
    "qwen3, s8": (
        Qwen3Config(**SMALL, **HEADS, head_dim=8),
        Qwen3Config(
            **WIDE, hidden_size=1024, intermediate_size=12288, num_hidden_layers=3, **HEADS, tie_word_embeddings=True
        ),
        dict(amp="bf16", quant="s8"),
    ),
    "mistral, s4": (
        MistralConfig(**SMALL, **HEADS),
        MistralConfig(**WIDE, hidden_size=2048, intermediate_size=7168, num_hidden_layers=3, **HEADS),
        dict(amp="bf16", quant="s4"),
    ),
    "t5, f32": (
        T5Config(vocab_size=301, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0),
        T5Config(vocab_size=16000, d_model=768, d_ff=3072, num_layers=2, num_heads=12, decoder_start_token_id=0),
        dict(amp="f32"),
    ),
}


def saved(config, directory):
    """A checkpoint whose values do not matter."""
    kind = T5ForConditionalGeneration if config.model_type == "t5" else AutoModelForCausalLM
    make = kind._from_config if config.model_type == "t5" else kind.from_config
    with torch.device("meta"):
        model = make(config, dtype=torch.float32 if config.model_type in ("gpt2", "t5") else torch.bfloat16)
    model.to_empty(device="cpu")
    model.tie_weights()
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(0.01)
    model.save_pretrained(directory)
    return str(directory)


def opened(directory, quant=None, **options):
    switches = NeuronConfig(quant=QuantizationConfig(quant) if quant else None)
    attributes = load_config(directory)
    return family_of(attributes["model_type"]).from_pretrained(directory, neuron_config=switches, **options)


@pytest.mark.parametrize("name", ["the bundled checkpoint", *MODELS])
def test_weights_and_caches_are_what_is_held(tmp_path, name):
    small, _, options = MODELS.get(name, (None, None, dict(amp="bf16", n_positions=128)))
    model = opened(saved(small, tmp_path) if small else TINY_KJV, **options)
    degree = model.options.tp_degree
    planned = Planner(model).needs(degree, on_cpu=True)
    decoder = model.decoder_on(get_runtime("cpu", degree))
    decoder.take(decoder.read(model.checkpoint))
    assert abs(planned.weights * degree / decoder.memory_use.weights - 1) < CLOSE
    assert planned.caches * degree == decoder.memory_use.caches


# Programs are compiled and run once before, with weights that are freed: memory of code, compiler and threads must not
# count. Free heap memory is returned first, or a freed weight would count as one that is there.
RESIDENT = """
import ctypes, gc, json, sys
import numpy as np
from test_planning import opened
from transformers_neuronx.analysis.planning import Planner
from transformers_neuronx.runtimes import get_runtime

directory, options = sys.argv[1], json.loads(sys.argv[2])
model = opened(directory, n_positions=[256], context_length_estimate=[128], **options)
degree = model.options.tp_degree
decoder = model.decoder_on(get_runtime("cpu", degree))
decoder.store.compile(decoder.planned())
model._decoder = decoder

def memory(kind):
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    [line] = [line for line in open("/proc/self/status") if line.startswith(kind)]
    return int(line.split()[1]) * 1024

def take():
    decoder.take(decoder.read(model.checkpoint))

def use():
    model.sample([list(range(1, 121))], 136, top_k=1)

take()
use()
for held in (decoder.weights, decoder._operands, decoder.caches, decoder.memory.arrays):
    held.clear()
for _, executable in decoder.store.stored.values():
    if loaded := getattr(executable, "_loaded", executable):
        loaded._held = (), []  # the weights of its last call
decoder.runtime.put([np.zeros(1)])  # jaxlib frees what arrays had when it makes the next one
before = memory("VmRSS")
take()
use()
resident = memory("VmRSS") - before
open("/proc/self/clear_refs", "w").write("5")  # the peak while loading is another test's
use()
needs = Planner(model).needs(degree, on_cpu=True)
kept = degree * (needs.weights + needs.caches)
print(json.dumps(dict(resident=resident, peak=memory("VmHWM") - before, kept=kept, total=degree * needs.total)))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs /proc, which has the resident memory")
@pytest.mark.parametrize("name", MODELS)
def test_what_is_resident(tmp_path, name):
    _, large, options = MODELS[name]
    command = [sys.executable, "-c", RESIDENT, saved(large, tmp_path), json.dumps(options)]
    heap = dict(MALLOC_ARENA_MAX="1")
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[2])])
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ | heap | dict(PYTHONPATH=path))
    assert result.returncode == 0, result.stderr
    memory = json.loads(result.stdout)
    print(f"{name}: {memory['kept'] / 2**20:.0f} MiB planned, {memory['resident'] / 2**20:.0f} resident, ", end="")
    print(f"with temporaries {memory['total'] / 2**20:.0f}, {memory['peak'] / 2**20:.0f} at the peak")
    assert abs(memory["kept"] / memory["resident"] - 1) < CLOSE
    assert abs(memory["total"] / memory["peak"] - 1) < CLOSE


def test_the_roofline():
    planner = Planner(family_of("llama")(MODELS["llama, bf16"][1], amp="bf16", n_positions=[256], batch_size=2))
    needs = planner.needs(1)
    h, inner, layers, head = 1024, 3072, 6, 128
    matrices = layers * (2 * h * h + 2 * h * 2 * head + 3 * h * inner) + 16000 * h
    cache = 2 * layers * 2 * 2 * head * 256
    products = 2 * 2 * matrices + 2 * 2 * layers * 2 * h * 256
    assert needs.caches == cache * 2 and needs.token.flops == products
    assert 1 < needs.token.bytes / (2 * (matrices + cache)) < 1.01
    slow, fast = (Place("there", (1,), Core(2**40, 1e9, peak)) for peak in (1e9, 1e15))
    assert planner.fit(slow, 1).token_seconds == products / 1e9
    assert planner.fit(fast, 1).token_seconds == needs.token.bytes / 1e9
    assert planner.fit(Place("unknown", (1,), Core(2**40, None, None)), 1).token_seconds is None


def test_a_device_more_is_taken_where_one_is_too_small():
    planner = Planner(family_of("llama")(MODELS["llama, bf16"][1], amp="bf16", n_positions=[256]))
    total = {degree: planner.needs(degree).total for degree in (1, 2, 4)}
    assert total[1] > total[2] > total[4]

    def least(memory):
        [fit] = planner.plan([Place("there", (1, 2, 4), Core(memory, None, None))]).fits
        return fit.degree, fit.fits

    assert least(total[1]) == (1, True)
    assert least(total[1] - 1) == least(total[2]) == (2, True)
    assert least(total[2] - 1) == (4, True)
    assert least(total[4] - 1) == (4, False)
