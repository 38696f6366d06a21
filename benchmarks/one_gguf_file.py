"""Run one GGUF file in an engine of this project and in llama.cpp's server: tokens, prompts, the start and the memory.

    python benchmarks/one_gguf_file.py FILE [--rounds 3] [--amp bf16] [--llama-server PATH] [--out results.json]

FILE may be Q4_K_M, Q4_0 or Q8_0: then it is made, with random weights in the shape of TinyLlama 1.1B. Engines take
turns, a process each. Prompts are random, and new each time. A token is the mean of 127 after a prompt of 16, greedily,
of one request or of eight at once. A prompt is the time to its first token. All are medians of the runs in a round, and
of the rounds. A start is of a whole process, until it can answer: ours has Python and its imports, and takes programs
from the compile cache if an earlier run left them. `benchmarks/serving.py` builds llama.cpp's server.
"""

import argparse
import http.client
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from peers.common import free_port
from peers.results import machine
from tqdm import tqdm

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "transformers_neuronx-benchmarks")
SERVER = CACHE / "environments" / "llama_server" / "bin" / "llama-server"
PROMPTS, SHORT, COUNT, ROWS, RUNS = (128, 1024), 16, 128, 8, 3
POSITIONS = 2048
MIXES = ("Q4_K_M", "Q4_0", "Q8_0")


def drawn(number, count):
    draw = random.Random(number)
    return [draw.randrange(20, 20_000) for _ in range(count)]


def measured(began, answered, peak):
    """Measure with `answered(ids, count)`, which returns the seconds from the request to each of so many tokens."""
    found, start, numbers = {}, time.time() - began, iter(range(1, 1_000_000))

    def asked(length, count):
        return answered(drawn(next(numbers), length), count)

    def each(times):
        return (times[-1] - times[0]) / (len(times) - 1) * 1e3

    asked(SHORT, 2)
    with ThreadPoolExecutor(ROWS) as clients:
        for _ in range(RUNS):
            for length in PROMPTS:
                found.setdefault(f"prompt of {length}, ms", []).append(asked(length, 1)[0] * 1e3)
            found.setdefault("token, ms", []).append(each(asked(SHORT, COUNT)))
            rows = [*clients.map(lambda _: asked(SHORT, COUNT), range(ROWS))]
            found.setdefault(f"token of {ROWS} requests, ms", []).append(statistics.mean(map(each, rows)))
    medians = {name: statistics.median(values) for name, values in found.items()}
    return medians | {"start, s": start, "peak, MiB": peak()}


def ours(arguments):
    """Measure in this process, which began at a given time."""
    from transformers_neuronx import Engine, NeuronAutoModelForCausalLM, SamplingParams

    model = NeuronAutoModelForCausalLM.from_pretrained(arguments.file, amp=arguments.amp, n_positions=POSITIONS)
    model.to_neuron(ahead=False)
    with Engine(model, rows=ROWS) as engine:

        def answered(ids, count):
            began = time.perf_counter()
            handle = engine.submit(ids, SamplingParams(max_tokens=count, temperature=0, ignore_eos=True))
            return [time.perf_counter() - began for _ in handle]

        peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # noqa: E731
        print(json.dumps(measured(arguments.ours, answered, peak)))


def llama_cpp(arguments):
    port, threads = free_port(), len(os.sched_getaffinity(0))
    sizes = {"--threads": threads, "--parallel": ROWS, "--ctx-size": POSITIONS * ROWS // 4, "--port": port}
    switches = [str(part) for pair in sizes.items() for part in pair]
    command = [arguments.llama_server, "--model", arguments.file, "--no-ui", "--host", "127.0.0.1", "--kv-unified"]
    began = time.time()
    with subprocess.Popen([*command, *switches], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:

        def is_ready():
            try:
                with closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
                    connection.request("GET", "/health")
                    return connection.getresponse().status == 200
            except ConnectionError:
                return False

        def answered(ids, count):
            rules = dict(temperature=0, ignore_eos=True, cache_prompt=False, stream=True, return_tokens=True)
            began, times = time.perf_counter(), []
            with closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
                connection.request("POST", "/completion", json.dumps(dict(prompt=ids, n_predict=count) | rules))
                for line in connection.getresponse():
                    if line.startswith(b"data: {"):
                        times += [time.perf_counter() - began] * len(json.loads(line[6:])["tokens"])
            return times

        def peak():
            status = Path(f"/proc/{process.pid}/status").read_text()
            return int(status.partition("VmHWM:")[2].split()[0]) / 1024

        while not is_ready():
            if process.poll() is not None:
                sys.exit(f"llama-server ended with {process.returncode}")
            time.sleep(0.02)
        found = measured(began, answered, peak)
        process.kill()
    return found


def in_another_process(arguments):
    command = [sys.executable, __file__, arguments.file, "--amp", arguments.amp, "--ours", str(time.time())]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(ran.stdout.strip().rpartition("\n")[2])


def made(mix):
    """Return a file of random weights, which is made once."""
    from peers.random_gguf import write

    path = CACHE / "files" / f"tinyllama-{mix}.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path.with_suffix(".part"), mix)
        path.with_suffix(".part").rename(path)
    return str(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--amp", default="bf16")
    parser.add_argument("--llama-server", default=SERVER)
    parser.add_argument("--out", help="JSON file to which this run is added")
    parser.add_argument("--ours", type=float, help=argparse.SUPPRESS)  # when the process began that measures ours
    arguments = parser.parse_args()
    if arguments.ours:
        ours(arguments)
        return
    name, engines = arguments.file, {"llama.cpp": llama_cpp, "ours": in_another_process}
    arguments.file = made(name) if name in MIXES else name
    found = {engine: [] for engine in engines}
    for _ in tqdm(range(arguments.rounds), leave=False):
        for engine, measure in engines.items():
            found[engine].append(measure(arguments))
    print(f"| {name} | llama.cpp | ours | theirs / ours |\n|---|---|---|---|")
    medians = {
        engine: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for engine, runs in found.items()
    }
    for key, own in medians["ours"].items():
        theirs = medians["llama.cpp"][key]
        print(f"| {key} | {theirs:.2f} | {own:.2f} | {theirs / own:.2f} |")
    if arguments.out:
        out = Path(arguments.out)
        runs = json.loads(out.read_text()) if out.exists() else []
        runs.append(dict(file=Path(name).name, amp=arguments.amp, rounds=arguments.rounds, **machine()) | medians)
        out.write_text(json.dumps(runs, indent=1) + "\n")


if __name__ == "__main__":
    main()
