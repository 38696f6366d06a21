"""What `to_neuron()` costs: with the compiler, with the cache, and from a saved artifact, side by side.

    python benchmarks/startup.py [--model DIRECTORY] [--tp-degree 1] [--amp f32] [--rounds 5]

The ways take turns in one process, so importing is not in it; medians and the spread between quartiles are printed, as
seconds and as parts of compiling. The cache is a temporary directory, not the user's.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

from transformers_neuronx.auto import NeuronAutoModelForCausalLM

TINY_KJV = Path(__file__).parents[1] / "examples" / "tiny-kjv"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=TINY_KJV)
    parser.add_argument("--tp-degree", type=int, default=1)
    parser.add_argument("--amp", default="f32")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    options = dict(n_positions=128, tp_degree=arguments.tp_degree, amp=arguments.amp)

    def started(directory, load=None, cache="off"):
        os.environ["NEURONX_CACHE"] = cache
        model = NeuronAutoModelForCausalLM.from_pretrained(directory, **options)
        if load:
            model.load(load)
        model.to_neuron()
        return model

    with tempfile.TemporaryDirectory() as directory:
        os.environ["NEURONX_CACHE_DIR"] = f"{directory}/cache"
        model = started(arguments.model, cache="on")
        model.save(f"{directory}/programs")
        model.save(f"{directory}/whole", sharded_weights=True)
        ways = {
            "compiled": lambda: started(arguments.model),
            "from the cache": lambda: started(arguments.model, cache="on"),
            "programs of an artifact": lambda: started(arguments.model, load=f"{directory}/programs"),
            "an artifact with weights": lambda: started(f"{directory}/whole"),
        }
        times = {name: [] for name in ways}
        for _ in range(arguments.rounds):
            for name, way in ways.items():
                start = time.perf_counter()
                way()
                times[name].append(time.perf_counter() - start)
    base = statistics.median(times["compiled"])
    print(f"{arguments.model}, {arguments.amp}, tp_degree {arguments.tp_degree}")
    for name, values in times.items():
        low, middle, high = statistics.quantiles(values, n=4)
        print(f"{name:28}{middle:8.3f} s ({low:.3f} to {high:.3f}) {middle / base:7.3f} of compiling")


if __name__ == "__main__":
    main()
