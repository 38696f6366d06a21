"""Time to write and compile the programs of a large model: the graphs of Llama-3-8B, without weights.

python benchmarks/compiling.py [--layers 32] [--amp bf16] [--quant s8]
"""

import argparse
import os
import time

os.environ["NEURONX_CACHE"] = "off"

from peers.checkpoint import LLAMA_8B
from transformers import LlamaConfig

from transformers_neuronx.config import Buckets, CompileOptions, QuantizationConfig
from transformers_neuronx.engine.keys import program_name
from transformers_neuronx.llama.model import LlamaForSampling
from transformers_neuronx.runtimes import get_runtime
from transformers_neuronx.serving.paged_slots import PagedDecoder


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--amp", default="bf16")
    parser.add_argument("--quant", choices=["s8", "s4"])
    arguments = parser.parse_args()
    quant = QuantizationConfig(arguments.quant) if arguments.quant else None
    options = CompileOptions(Buckets((2048,), (1024,)), amp=arguments.amp, quant=quant)
    family = LlamaForSampling.family
    config = family.read_config(LlamaConfig(**LLAMA_8B, num_hidden_layers=arguments.layers).to_dict())
    decoder = PagedDecoder(family, config, get_runtime("cpu", 1), options)
    began = time.perf_counter()
    for key in decoder.planned():
        start = time.perf_counter()
        for segment in key.segments(decoder.programs):
            key.written(decoder.programs, segment)
        print(f"{program_name(key, decoder.programs.whole)}: written in {time.perf_counter() - start:.2f} s")
    started = time.perf_counter()
    decoder.store.compile(decoder.planned())
    together = time.perf_counter() - started
    print(f"all written in {started - began:.1f} s; written and compiled in parallel in {together:.1f} s")


if __name__ == "__main__":
    main()
