"""Measure what adapters of requests cost: a step of running rows and a prompt, with and without, in one process.

    python benchmarks/adapters.py CHECKPOINT [--rank 16] [--adapters 8] [--amp bf16] [--rounds 5]

Adapters are random, of all linear layers. Engines with and without places for them take turns. "None" is an engine with
places whose requests have no adapter. Rows run at once, each with its own adapter; a token is the mean of 64 after a
prompt of 16. A prompt of one request has 512 tokens. Values are medians of the rounds, and ratios those of medians.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from transformers_neuronx import Engine, NeuronAutoModelForCausalLM, SamplingParams

PROMPT, SHORT, COUNT, POSITIONS = 512, 16, 64, 1024
MODULES = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def write_adapter(directory, checkpoint, rank, seed):
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name in checkpoint:
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in MODULES:
            outputs, inputs = checkpoint.shape(name)
            start = f"base_model.model.{module}"
            tensors[f"{start}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) * 0.01
            tensors[f"{start}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) * 0.01
    save_file(tensors, directory / "adapter_model.safetensors")
    facts = dict(peft_type="LORA", r=rank, lora_alpha=rank)
    (directory / "adapter_config.json").write_text(json.dumps(facts))


def measured(engine, names, vocabulary, seed):
    """Return milliseconds of a token of all rows at once, and of a prompt."""
    draw = np.random.default_rng(seed)
    greedy = dict(temperature=0, ignore_eos=True)

    def submitted(name, length, count):
        ids = draw.integers(20, vocabulary - 1, length).tolist()
        return engine.submit(ids, SamplingParams(max_tokens=count, adapter=name, **greedy))

    def seconds(counts):
        began = time.perf_counter()
        for handle in [submitted(name, SHORT, counts) for name in names]:
            handle.result()
        return time.perf_counter() - began

    short, long = seconds(1), seconds(1 + COUNT)
    began = time.perf_counter()
    submitted(names[0], PROMPT, 1).result()
    return (long - short) / COUNT * 1e3, (time.perf_counter() - began) * 1e3


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    for name, value in dict(rank=16, adapters=8, rows=8, rounds=5).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--amp", default="bf16")
    arguments = parser.parse_args()
    sizes = dict(n_positions=POSITIONS, context_length_estimate=PROMPT, amp=arguments.amp)
    model = NeuronAutoModelForCausalLM.from_pretrained(arguments.checkpoint, **sizes)
    model.to_neuron(ahead=False)
    how = dict(rows=arguments.rows, step_tokens=256, cache_tokens=arguments.rows * POSITIONS, adjustments=False)
    vocabulary = model.decoder.config.vocab_size
    with (
        Engine(model, **how) as plain,
        Engine(model, max_loras=arguments.adapters, max_lora_rank=arguments.rank, **how) as engine,
        tempfile.TemporaryDirectory() as folder,
    ):
        names, loads = [f"adapter-{number}" for number in range(arguments.adapters)], []
        for number, name in enumerate(names):
            directory = Path(folder, name)
            directory.mkdir()
            write_adapter(directory, model.checkpoint, arguments.rank, number)
            began = time.perf_counter()
            engine.load_adapter(name, directory)
            loads.append((time.perf_counter() - began) * 1e3)
        rows = arguments.rows
        kinds = dict(
            without=(plain, [None] * rows), none=(engine, [None] * rows), one=(engine, names[:1] * rows),
            each=(engine, [names[row % len(names)] for row in range(rows)]),
        )  # fmt: skip
        times = {kind: [] for kind in kinds}
        for turn in range(-1, arguments.rounds):  # the first is to warm up
            for place, (kind, (one, own)) in enumerate(kinds.items()):
                found = measured(one, own, vocabulary, seed=(turn + 1) * len(kinds) + place)  # no prompt comes again
                times[kind] += [found] * (turn >= 0)
    base = [statistics.median(values) for values in zip(*times["without"], strict=True)]
    for kind, found in times.items():
        token, prompt = (statistics.median(values) for values in zip(*found, strict=True))
        ratios = dict(token_ratio=round(token / base[0], 3), prompt_ratio=round(prompt / base[1], 3))
        print(json.dumps(dict(kind=kind, token_ms=round(token, 2), prompt_ms=round(prompt, 1)) | ratios))
    print(json.dumps(dict(load_ms=round(statistics.median(loads), 1))))


if __name__ == "__main__":
    main()
