"""How long a model takes to start, and how much memory it needs for that: from a checkpoint, from an artifact.

    python benchmarks/loading.py [--rounds 3] [--amp bf16] [--quant s8]

The checkpoint has the shape of TinyLlama-1.1B with random weights in bf16, in a temporary directory. Each start is a
separate process, measured up to the first logits, without imports. Starts take turns. Files are in the system's cache,
so this compares the work, not the disk.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = dict(
    vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32,
    num_key_value_heads=4, max_position_embeddings=2048,
)  # fmt: skip

# Each variant is a process. It prints the seconds of its last part, and how far its peak memory rose in that time.
MEASURED = """
import json, time

def peak():
    [line] = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024

{imports}
before, began = peak(), time.perf_counter()
{body}
print(json.dumps(dict(seconds=time.perf_counter() - began, bytes=peak() - before)))
"""
READ = """
held = []
for path in sorted(Path({directory!r}).glob("*.safetensors")):
    held.append(path.read_bytes())
"""
THEIRS = """
model = AutoModelForCausalLM.from_pretrained({directory!r}, dtype=torch.{dtype})
model(torch.zeros(1, 1, dtype=torch.int64))
"""
OURS = """
neuron_config = NeuronConfig(quant=QuantizationConfig({quant!r}) if {quant!r} else None)
options = dict(n_positions=[256], context_length_estimate=[64], amp={amp!r}, neuron_config=neuron_config)
model = LlamaForSampling.from_pretrained({directory!r}, **options)
model.to_neuron()
model([[0]])
"""
SAVE = OURS + "model.save({artifact!r}, sharded_weights=True)"
IMPORTS = {
    READ: "from pathlib import Path",
    THEIRS: "import torch\nfrom transformers import AutoModelForCausalLM, LlamaForCausalLM",
    OURS: """
from transformers import LlamaConfig
from transformers_neuronx.config import NeuronConfig, QuantizationConfig
from transformers_neuronx.llama.model import LlamaForSampling
from transformers_neuronx.runtimes import get_runtime
get_runtime("cpu", 1)
""",
}
DTYPES = dict(bf16="bfloat16", f32="float32", f16="float16")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--amp", default="bf16", choices=DTYPES)
    parser.add_argument("--quant", default="", help="s8, s4 or f8e4m3fn")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint, artifact = f"{scratch}/checkpoint", f"{scratch}/artifact"
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**SIZES)).to(torch.bfloat16).save_pretrained(checkpoint, max_shard_size="10GB")
        values = dict(amp=arguments.amp, quant=arguments.quant, dtype=DTYPES[arguments.amp], artifact=artifact)
        off, on = dict(NEURONX_CACHE="off"), dict(NEURONX_CACHE_DIR=f"{scratch}/cache")
        run(SAVE, values | dict(directory=checkpoint), IMPORTS[OURS], on)
        ways = {
            "the bytes of the checkpoint, read": (READ, checkpoint, off),
            "the bytes of the artifact, read": (READ, artifact, off),
            "Transformers": (THEIRS, checkpoint, off),
            "checkpoint, compiling": (OURS, checkpoint, off),
            "checkpoint, programs in the cache": (OURS, checkpoint, on),
            "artifact": (OURS, artifact, off),
        }
        taken = defaultdict(list)
        for _ in tqdm(range(arguments.rounds), leave=False):
            for name, (body, directory, environment) in ways.items():
                taken[name].append(run(body, values | dict(directory=directory), IMPORTS[body], environment))
        size = sum(path.stat().st_size for path in Path(artifact).glob("*.safetensors"))
    print(f"1.1 B parameters, {arguments.amp} {arguments.quant}, {size / 2**20:.0f} MiB of weights on the devices")
    for name, results in taken.items():
        seconds, peak = (statistics.median(result[what] for result in results) for what in ("seconds", "bytes"))
        print(f"{name:36}{seconds:8.2f} s {peak / 2**20:8.0f} MiB more at the peak, {peak / size:5.2f} of the weights")


def run(body, values, imports, environment):
    program = MEASURED.format(imports=imports, body=body.format(**values))
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, env=os.environ | environment, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(result.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
