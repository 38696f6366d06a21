"""How the cost of a token grows with the positions in use, the sequences and the layers. It should grow linearly.

    python benchmarks/growth.py [--rounds 5] [--figure growth.svg]

A small LLaMA with random weights in bf16, greedy. Models take turns. Prints a table for each, and how far its points
are from the straight line that fits them best. The figure needs matplotlib.
"""

import argparse
import tempfile
import time

import numpy as np
import torch
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

from transformers_neuronx.llama.model import LlamaForSampling

SIZES = dict(
    vocab_size=8192, hidden_size=1024, intermediate_size=2816, num_attention_heads=16, num_key_value_heads=4,
    max_position_embeddings=4096,
)  # fmt: skip
LAYERS, PROMPT, TOKENS = 8, 16, 64
GROWING = {
    "positions in use": [128, 512, 1024, 2048, 3072, 4000],
    "sequences": [1, 2, 4, 8, 16, 32],
    "layers": [2, 4, 8, 12, 16],
}


def made(what, size):
    """Return a function that generates a model's tokens and returns the seconds from the first to the last."""
    layers, rows = size if what == "layers" else LAYERS, size if what == "sequences" else 1
    prompt = size if what == "positions in use" else PROMPT
    positions = 4096 if what == "positions in use" else 128
    with tempfile.TemporaryDirectory() as scratch:
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=layers)).bfloat16().save_pretrained(scratch)
        model = LlamaForSampling.from_pretrained(
            scratch, n_positions=[positions], context_length_estimate=[128], batch_size=rows, amp="bf16"
        )
        model.to_neuron()
    ids = torch.arange(rows * prompt).view(rows, prompt) % SIZES["vocab_size"]

    def seconds():
        came = []
        watch = dict(stopping_criteria_list=lambda *_: came.append(time.perf_counter()) or False)
        model.sample(ids, prompt + 1 + TOKENS, top_k=1, eos_token_override=-1, **watch)
        return time.perf_counter() - came[0]

    return seconds


def draw(path, drawn):
    """Draw a plot for each growing quantity: the points, and the line that fits them best."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.2), layout="constrained")
    for axes, (what, (sizes, tokens, line)) in zip(figure.subplots(1, len(drawn)), drawn.items(), strict=True):
        axes.plot(sizes, line, color="0.7")
        axes.plot(sizes, tokens, "o", color="tab:blue", clip_on=False)
        axes.set(xlabel=what, xlim=(0, None), ylim=(0, None))
    figure.axes[0].set_ylabel("ms a token")
    figure.savefig(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--figure", help="file for the figure: a .svg or .png")
    arguments, drawn = parser.parse_args(), {}
    for what, sizes in GROWING.items():
        models = [made(what, size) for size in tqdm(sizes, desc=what, leave=False)]
        taken = [[model() for model in models] for _ in range(1 + arguments.rounds)]
        tokens = np.min(taken[1:], 0) / TOKENS * 1e3
        slope, start = np.polyfit(sizes, tokens, 1)
        line = start + slope * np.array(sizes)
        print(f"{what}: {start:.3f} + {slope:.5f} for each, in ms per token")
        for size, token, straight in zip(sizes, tokens, line, strict=True):
            print(f"{size:8}{token:10.3f} ms{token / straight - 1:+9.1%} from the line")
        drawn[what] = sizes, tokens, line
    if arguments.figure:
        draw(arguments.figure, drawn)


if __name__ == "__main__":
    main()
