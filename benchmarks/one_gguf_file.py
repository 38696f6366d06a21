"""Run one GGUF file in this project and in llama.cpp's server: a token, a prompt, the start and the memory.

    python benchmarks/one_gguf_file.py FILE [--rounds 3] [--amp bf16] [--llama-server PATH]

Engines take turns, a process each. A token is the mean of 127 after a prompt of 16, greedily; a prompt has 512 random
tokens. Both are medians of four runs in each round. Starts are of whole processes: ours has Python and its imports, and
takes programs from the compile cache if an earlier run left them. `benchmarks/serving.py` builds llama.cpp's server.
"""

import argparse
import http.client
import json
import os
import random
import resource
import socket
import statistics
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "transformers_neuronx-benchmarks")
SERVER = CACHE / "environments" / "llama_server" / "bin" / "llama-server"
PROMPT, SHORT, COUNT, RUNS = 512, 16, 128, 4
POSITIONS = 1024


def drawn(seed, count):
    draw = random.Random(seed)
    return [draw.randrange(20, 20_000) for _ in range(count)]


def measured(began, prompt, tokens, peak):
    """Measure with `prompt(ids)` and `tokens(ids)`, which return milliseconds, of a token for the second."""
    start = time.time() - began
    runs = [(prompt(drawn(number, PROMPT)), tokens(drawn(-number - 1, SHORT))) for number in range(RUNS)]
    prompts, each = (statistics.median(values) for values in zip(*runs, strict=True))
    return dict(token_ms=each, prompt_ms=prompts, start_s=start, peak_mib=peak())


def ours(arguments):
    """Measure in this process, which began at a given time."""
    import torch

    from transformers_neuronx import NeuronAutoModelForCausalLM

    sizes = dict(n_positions=POSITIONS, context_length_estimate=PROMPT)
    model = NeuronAutoModelForCausalLM.from_pretrained(arguments.file, amp=arguments.amp, **sizes)
    model.to_neuron()

    def prompt(ids):
        began = time.perf_counter()
        model(torch.tensor([ids])).argmax()
        return (time.perf_counter() - began) * 1e3

    def tokens(ids):
        times = []
        watch = dict(stopping_criteria_list=lambda *_: times.append(time.perf_counter()) or False)
        model.sample(torch.tensor([ids]), len(ids) + COUNT, top_k=1, eos_token_override=-1, **watch)
        return (times[-1] - times[0]) / (COUNT - 1) * 1e3

    peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # noqa: E731
    print(json.dumps(measured(arguments.ours, prompt, tokens, peak)))


def llama_cpp(arguments):
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    threads = len(os.sched_getaffinity(0))
    sizes = {"--threads": threads, "--parallel": 1, "--ctx-size": POSITIONS, "--port": port, "--host": "127.0.0.1"}
    switches = [str(part) for pair in sizes.items() for part in pair]
    command = [arguments.llama_server, "--model", arguments.file, "--no-ui", *switches]
    began = time.time()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:

        def ask(path, body=None):
            with closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
                connection.request("POST" if body else "GET", path, json.dumps(body) if body else None)
                response = connection.getresponse()
                return response.status, json.loads(response.read())

        def answered(ids, count):
            rules = dict(temperature=0, ignore_eos=True, cache_prompt=False)
            return ask("/completion", dict(prompt=ids, n_predict=count) | rules)[1]["timings"]

        def is_ready():
            try:
                return ask("/health")[0] == 200
            except ConnectionError:
                return False

        def tokens(ids):
            timings = answered(ids, COUNT)
            return timings["predicted_ms"] / timings["predicted_n"]

        def peak():
            status = Path(f"/proc/{process.pid}/status").read_text()
            return int(status.partition("VmHWM:")[2].split()[0]) / 1024

        while not is_ready():
            if process.poll() is not None:
                sys.exit(f"llama-server ended with {process.returncode}")
            time.sleep(0.02)
        found = measured(began, lambda ids: answered(ids, 1)["prompt_ms"], tokens, peak)
        process.kill()
    return found


def in_another_process(arguments):
    command = [sys.executable, __file__, arguments.file, "--amp", arguments.amp, "--ours", str(time.time())]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(ran.stdout.strip().rpartition("\n")[2])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--amp", default="bf16")
    parser.add_argument("--llama-server", default=SERVER)
    parser.add_argument("--ours", type=float, help=argparse.SUPPRESS)  # when the process began that measures ours
    arguments = parser.parse_args()
    if arguments.ours:
        ours(arguments)
        return
    engines = {"llama.cpp": llama_cpp, "ours": in_another_process}
    found = {name: [] for name in engines}
    for number in range(arguments.rounds):
        for name, measure in engines.items():
            found[name].append(measure(arguments))
            print(number, name, {key: round(value, 2) for key, value in found[name][-1].items()}, flush=True)
    for key in found["ours"][0]:
        theirs, own = (statistics.median(each[key] for each in found[name]) for name in engines)
        print(f"{key:10} llama.cpp {theirs:9.2f}  ours {own:9.2f}  theirs / ours {theirs / own:.2f}")


if __name__ == "__main__":
    main()
