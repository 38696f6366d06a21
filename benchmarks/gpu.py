"""Compare this project with Transformers on a GPU: the shape of Llama-3-8B in bf16, one sequence and sixty-four.

    python benchmarks/gpu.py [--layers 32] [--rows 1,64] [--engines ours,eager] [--rounds 3] [--out FILE]

Weights are random, decoding is greedy, with 128 tokens after prompts of 128. Ours also has its weights in s8.
Transformers runs unchanged, and with a static cache and a step compiled by `torch.compile`. Each measurement is a
process, and engines take turns. A step that reads all weights in bf16 once, as fast as the device copies memory, is at
1.00. To try the script, use --device cpu and few layers.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import torch
from peers.checkpoint import LLAMA_8B
from tqdm import tqdm

PROMPT, TOKENS, POSITIONS = 128, 128, 512
ENGINES = ("ours", "ours s8", "eager", "compile")


def ours(task, ids):
    from transformers_neuronx.config import NeuronConfig, QuantizationConfig
    from transformers_neuronx.llama.model import LlamaForSampling

    quant = QuantizationConfig(quant_dtype="s8", quantize_head=True) if task["engine"] == "ours s8" else None
    model = LlamaForSampling.from_pretrained(
        task["checkpoint"], n_positions=[POSITIONS], context_length_estimate=[PROMPT], batch_size=len(ids),
        amp="bf16", neuron_config=NeuronConfig(runtime=task["device"], quant=quant),
    )  # fmt: skip
    model.to_neuron()
    return lambda count: model.sample(ids, PROMPT + count, top_k=1, eos_token_override=-1)


def theirs(task, ids):
    from transformers import AutoModelForCausalLM, StaticCache

    torch.set_grad_enabled(False)
    model = AutoModelForCausalLM.from_pretrained(task["checkpoint"], dtype=torch.bfloat16).to(task["device"])
    cache = StaticCache(config=model.config, max_cache_len=POSITIONS)

    def step(ids):
        return model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits.argmax(-1)

    following = torch.compile(step, mode="reduce-overhead") if task["engine"] == "compile" else step

    def generate(count):
        cache.reset()
        token = step(ids.to(task["device"]))
        for _ in range(count - 1):
            token = following(token).clone()
        token.tolist()  # waits for it

    return generate


def measure(task):
    """Return the milliseconds to the first token and of each token after it, and the seconds until both were tried."""
    torch.manual_seed(0)
    ids = torch.randint(0, LLAMA_8B["vocab_size"], (task["rows"], PROMPT))
    began = time.perf_counter()
    generate = (ours if task["engine"].startswith("ours") else theirs)(task, ids)

    def seconds(count):
        began = time.perf_counter()
        generate(count)
        return time.perf_counter() - began

    for count in (1, 1 + TOKENS):
        seconds(count)
    ready = time.perf_counter() - began
    first, all_of_them = (min(seconds(count) for _ in range(3)) for count in (1, 1 + TOKENS))
    return [first * 1e3, (all_of_them - first) / TOKENS * 1e3, ready]


def copied(device, size=2**30):
    """Return the bytes per second that the device reads and writes at best when it copies."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target, taken = torch.empty_like(source), []
    for _ in range(10):
        began = time.perf_counter()
        target.copy_(source)
        target[-1].item()
        taken.append(time.perf_counter() - began)
    return 2 * size / min(taken)


def make(directory, layers, device):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(**LLAMA_8B, num_hidden_layers=layers))
    model.save_pretrained(directory, max_shard_size="4GB")
    return sum(weight.nbytes for weight in model.parameters()) - model.get_input_embeddings().weight.nbytes


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rows", default="1,64")
    parser.add_argument("--engines", default=",".join(ENGINES), help=", ".join(ENGINES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out")
    parser.add_argument("--task", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.task:
        print("\n" + json.dumps(measure(arguments.task)))
        return
    taken = defaultdict(list)
    with tempfile.TemporaryDirectory() as scratch:
        weights, rate = make(scratch, arguments.layers, arguments.device), copied(arguments.device)
        torch.cuda.empty_cache()  # the others need it
        rows = [(engine, int(rows)) for rows in arguments.rows.split(",") for engine in arguments.engines.split(",")]
        for engine, count in tqdm(rows * arguments.rounds, leave=False):
            task = dict(engine=engine, rows=count, checkpoint=scratch, device=arguments.device)
            command = [sys.executable, __file__, "--task", json.dumps(task)]
            ran = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
            taken[engine, count].append(json.loads(ran.stdout.strip().rpartition("\n")[2]))
            tqdm.write(f"{engine} {count}: {taken[engine, count][-1]}")
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else "the CPU"
    print(f"{name}, {arguments.layers} layers, copies {rate / 1e9:.0f} GB/s, weights of {weights / 1e9:.2f} GB")
    results = []
    for (engine, count), runs in taken.items():
        first, token, ready = (statistics.median(column) for column in zip(*runs, strict=True))
        share = weights / (token * 1e-3) / rate
        times = f"{first:9.1f} ms to the first{token:9.2f} ms a token, {share:.2f} of copying{ready:6.0f} s to start"
        print(f"{engine:8}{count:4} rows{times}")
        results.append(dict(engine=engine, rows=count, first=first, token=token, ready=ready, share=share, runs=runs))
    if arguments.out:
        facts = dict(device=name, layers=arguments.layers, copied=rate, weights=weights, date=time.strftime("%Y-%m-%d"))
        Path(arguments.out).write_text(json.dumps(facts | dict(results=results), indent=1) + "\n")


if __name__ == "__main__":
    main()
