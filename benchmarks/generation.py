"""Compare the cost of a token: the loop on the devices, the loop on the host, and Hugging Face's `generate()`.

    python benchmarks/generation.py [--model DIRECTORY] [--tokens 96] [--batch 1] [--rounds 7]

The variants take turns, so that a busy machine slows all of them. Medians and quartiles are printed, in milliseconds
per token and relative to the host loop. Nothing else should run at the same time.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
from transformers import AutoConfig

from transformers_neuronx.config import NeuronConfig
from transformers_neuronx.huggingface.adapter import HuggingFaceGenerationModelAdapter
from transformers_neuronx.huggingface.auto import NeuronAutoModelForCausalLM
from transformers_neuronx.speculation.drafts import SpeculativeGenerator

TINY_KJV = Path(__file__).parents[1] / "examples" / "tiny-kjv"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=TINY_KJV)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--amp", default="f32")
    arguments = parser.parse_args()
    positions = 16 + arguments.tokens

    def compiled(**switches):
        model = NeuronAutoModelForCausalLM.from_pretrained(
            arguments.model, n_positions=positions, context_length_estimate=16, batch_size=arguments.batch,
            amp=arguments.amp, neuron_config=NeuronConfig(**switches),
        )  # fmt: skip
        model.to_neuron()
        return model

    device, host = compiled(), compiled(tokens_per_dispatch=0)
    adapter = HuggingFaceGenerationModelAdapter(AutoConfig.from_pretrained(arguments.model), host)
    speculating = SpeculativeGenerator(None, device)
    ids = torch.randint(0, device.config.vocab_size, (arguments.batch, 16), generator=torch.manual_seed(0))
    same = dict(eos_token_override=-1)
    ways = {
        "host loop, greedy": lambda: host.sample(ids, positions, top_k=1, **same),
        "device loop, greedy": lambda: device.sample(ids, positions, top_k=1, **same),
        "device loop, top_k=50": lambda: device.sample(ids, positions, seed=0, **same),
        "device loop, top_p=0.9 of all": lambda: device.sample(ids, positions, top_k=0, top_p=0.9, seed=0, **same),
        "generate(), greedy": lambda: adapter.generate(
            ids, attention_mask=torch.ones_like(ids), max_length=positions, min_length=positions, do_sample=False,
            pad_token_id=0,
        ),
        "prompt lookup, greedy": lambda: speculating.sample(ids, positions, top_k=1, **same),
    }  # fmt: skip
    times = {name: [] for name in ways}
    for number in range(arguments.rounds + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            output = way()
            assert output.shape == (arguments.batch, positions)
            if number:  # the first round warms up
                times[name].append((time.perf_counter() - start) / arguments.tokens * 1e3)
    base = statistics.median(times["host loop, greedy"])
    print(f"{arguments.model}, {arguments.amp}, batch {arguments.batch}, {arguments.tokens} tokens after 16")
    for name, values in times.items():
        low, middle, high = statistics.quantiles(values, n=4)
        print(f"{name:32}{middle:9.3f} ms a token ({low:.3f} to {high:.3f}) {middle / base:7.2f} of the host loop")


if __name__ == "__main__":
    main()
