"""Compare kernels and whole steps with those of an earlier commit, and fail if they are slower.

    python benchmarks/gate.py [--against v1.2.0] [--least 0.9] [--only steps] [--history gate.jsonl] [--figure gate.svg]

By default, that is the last release, or, before the first one, the newest commit that is a week old. Kernels are those
of kernel_times.py. A step is a token of a small LLaMA or GPT-2 with random weights: a process of each commit waits for
its turn, and the two turns of a pair follow each other, so that a changing clock or a busy neighbour affects both. Both
are started three times.

Prints how many times as fast each is: the median of all pairs, and the quartiles. One is slower if even its upper
quartile is below `--least`: then the exit status is 1. A line of the history has all medians of one run; the figure,
which needs matplotlib, draws the lines.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from kernel_times import ROOT, Ratio, archive, comparisons, in_pairs
from peers.results import machine

from transformers_neuronx.runtimes import kernels

STEPS = [(shape, kind, rows) for shape in ("gpt2", "llama") for kind in ("f32", "bf16", "s8") for rows in (1, 8)]
WEEK = 7 * 24 * 3600
STARTS = 3  # of processes: where their memory lies changes a step by up to a tenth, as long as they live

# What each process runs, with its commit's code: for each line that it reads, it prints a token's milliseconds.
WORKER = """
import sys, tempfile, time
import torch
from transformers import GPT2Config, LlamaConfig, AutoModelForCausalLM
from transformers_neuronx import NeuronAutoModelForCausalLM
from transformers_neuronx.config import NeuronConfig, QuantizationConfig

shape, kind, rows = sys.argv[1], sys.argv[2], int(sys.argv[3])
sizes = dict(hidden_size=1024, intermediate_size=2816, num_attention_heads=16, num_key_value_heads=4)
config = GPT2Config(n_layer=6) if shape == "gpt2" else LlamaConfig(**sizes, num_hidden_layers=6, vocab_size=8192)
quant = QuantizationConfig(quant_dtype="s8") if kind == "s8" else None
with tempfile.TemporaryDirectory() as scratch:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(scratch)
    model = NeuronAutoModelForCausalLM.from_pretrained(
        scratch, amp="f32" if kind == "f32" else "bf16", batch_size=rows, n_positions=128,
        neuron_config=NeuronConfig(quant=quant),
    )
    model.to_neuron()
prompt = torch.arange(16).repeat(rows, 1) + 5
model.sample(prompt, sequence_length=32)
print("ready", flush=True)
for _ in sys.stdin:
    seconds = []
    for tokens in (1, 49):
        began = time.perf_counter()
        model.sample(prompt, sequence_length=16 + tokens, top_k=1)
        seconds.append(time.perf_counter() - began)
    print(1e3 * (seconds[1] - seconds[0]) / 48, flush=True)
"""


def built(tree):
    """Compile a commit's extensions for this processor, where they are."""
    how = os.environ | dict(NEURONX_BUILD_LEVELS="native")
    subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=tree, env=how, check=True)


class Stepping:
    """A process that steps a model with the code of a tree."""

    def __init__(self, tree, shape, kind, rows):
        how = os.environ | dict(PYTHONPATH=str(tree))
        command = [sys.executable, "-c", WORKER, shape, kind, str(rows)]
        self.process = subprocess.Popen(
            command, cwd=tree, env=how, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def __enter__(self):
        self.said()
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.wait()

    def said(self):
        if line := self.process.stdout.readline():
            return line
        raise SystemExit(f"a process ended with status {self.process.wait()}: {self.process.args}")

    def __call__(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return float(self.said())


def steps(there, count):
    """Yield the name and the ratio of each step, of so many pairs of turns."""
    for shape, kind, rows in STEPS:
        pairs = []
        for start in range(STARTS):
            trees = [ROOT, there] if start % 2 else [there, ROOT]
            with Stepping(trees[0], shape, kind, rows) as first, Stepping(trees[1], shape, kind, rows) as last:
                both = [first, last] if start % 2 else [last, first]
                pairs += in_pairs(lambda each: each(), both, -(-count // STARTS))
        yield f"step of {shape}, {kind}, {rows} rows", Ratio.of(pairs)


def git(*command):
    return subprocess.run(["git", "-C", str(ROOT), *command], capture_output=True, text=True).stdout.strip()


def last_release():
    """Return the last release, or the newest commit that is a week old."""
    week = f"--before={int(time.time()) - WEEK}"
    found = git("describe", "--tags", "--abbrev=0", "--match=v*", "HEAD^") or git("rev-list", "-1", week, "HEAD")
    return found or sys.exit("no commit is a week old: give one with --against")


def draw(history, path):
    """Draw the medians of all runs, a line for each kind of measurement."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained", facecolor="white")
    axes = figure.subplots()
    kinds = {name.split(",")[0] for run in history for name in run["ratios"]}
    for kind in sorted(kinds):
        middles = [
            np.exp(np.mean([np.log(ratio) for name, ratio in run["ratios"].items() if name.split(",")[0] == kind]))
            for run in history
        ]
        axes.plot(middles, marker="o", markersize=4, label=kind)
    axes.axhline(1, color="gray", linewidth=1)
    axes.set_xticks(range(len(history)), [run["commit"][:7] for run in history], rotation=90, fontsize=7)
    axes.set_ylabel("times as fast as the last release", fontsize=9)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", help="a commit")
    parser.add_argument("--least", type=float, default=0.9, help="how many times as fast each must be")
    parser.add_argument("--only", choices=("linear", "attention", "steps"))
    parser.add_argument("--pairs", type=int, default=15, help="pairs of turns of a step, in three starts")
    parser.add_argument("--history", help="JSON lines: a line is added")
    parser.add_argument("--figure", help="SVG file of the history")
    arguments = parser.parse_args()
    if arguments.figure and not arguments.history:
        parser.error("--figure needs --history")
    against, ratios = arguments.against or last_release(), {}
    with tempfile.TemporaryDirectory() as there:
        archive(against, there)
        built(there)
        compared = [comparisons(there, kernels.built().levels()[-1], arguments.only)]
        if arguments.only in (None, "steps"):
            compared.append(steps(there, arguments.pairs))
        for name, ratio in itertools.chain(*compared):
            print(f"{name}: {ratio} times as fast as {against}", flush=True)
            ratios[name] = ratio
    if arguments.history:
        run = dict(
            date=time.strftime("%Y-%m-%d"), commit=git("rev-parse", "HEAD"), against=against, **machine(),
            ratios={name: round(ratio.middle, 3) for name, ratio in ratios.items()},
        )  # fmt: skip
        with open(arguments.history, "a") as file:
            file.write(json.dumps(run) + "\n")
    if arguments.figure:
        draw([json.loads(line) for line in Path(arguments.history).read_text().splitlines()], arguments.figure)
    if slower := [f"{name}: {ratio}" for name, ratio in ratios.items() if ratio.high < arguments.least]:
        sys.exit(f"less than {arguments.least} times as fast as {against}:\n" + "\n".join(slower))


if __name__ == "__main__":
    main()
