"""The cost of a token with weights of each width, with and without kernels: greedy, one sequence, GPT-2 124M.

    python benchmarks/widths.py [--rounds 3]

Weights are random. Each combination is a separate process, and they take turns.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict

from tqdm import tqdm
from transformers import GPT2Config, GPT2LMHeadModel

WIDTHS = {
    "f32": ("f32", None),
    "bf16": ("bf16", None),
    "f16": ("f16", None),
    "s8": ("bf16", dict(quant_dtype="s8")),
    "s8, activations too": ("bf16", dict(quant_dtype="s8", activation_dtype="s8")),
    "s4": ("bf16", dict(quant_dtype="s4")),
    "s4, activations in s8": ("bf16", dict(quant_dtype="s4", activation_dtype="s8")),
}
PROMPT, TOKENS = 128, 64
MEASURED = """
import json, sys, time
import torch
from transformers_neuronx.config import NeuronConfig, QuantizationConfig
from transformers_neuronx.gpt2.model import GPT2ForSampling

directory, amp, quant, prompt, tokens = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), *map(int, sys.argv[4:])
switches = NeuronConfig(quant=QuantizationConfig(**quant) if quant else None)
options = dict(n_positions=[2 * prompt], context_length_estimate=[prompt], amp=amp, neuron_config=switches)
model = GPT2ForSampling.from_pretrained(directory, **options)
model.to_neuron()
ids = torch.arange(prompt)[None]

def seconds(new):
    began = time.perf_counter()
    model.sample(ids, prompt + new, top_k=1, eos_token_override=-1)
    return time.perf_counter() - began

for new in (1, 1 + tokens):
    seconds(new)
first, all_of_them = (min(seconds(new) for _ in range(5)) for new in (1, 1 + tokens))
print(json.dumps([first * 1e3, (all_of_them - first) / tokens * 1e3]))
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    taken = defaultdict(list)
    with tempfile.TemporaryDirectory() as scratch:
        GPT2LMHeadModel(GPT2Config()).save_pretrained(scratch)
        ways = [(name, kernels) for name in WIDTHS for kernels in ("off", "auto")]
        for name, kernels in tqdm(ways * rounds, leave=False):
            amp, quant = WIDTHS[name]
            command = [sys.executable, "-c", MEASURED, scratch, amp, json.dumps(quant), str(PROMPT), str(TOKENS)]
            environment = os.environ | dict(NEURONX_KERNELS=kernels)
            ran = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
            taken[name, kernels].append(json.loads(ran.stdout))
    base = statistics.median(token for _, token in taken["f32", "off"])
    print(f"{'':24}{'kernels':>8}{f'{PROMPT} tokens':>14}{'a token':>12}{'as fast as f32 in XLA':>24}")
    for (name, kernels), results in taken.items():
        encoding, token = (statistics.median(column) for column in zip(*results, strict=True))
        print(f"{name:24}{kernels:>8}{encoding:11.0f} ms{token:9.2f} ms{base / token:24.2f}")


if __name__ == "__main__":
    main()
