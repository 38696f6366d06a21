"""Compare engines that answer many requests on the CPU: tokens a second, and how long clients wait for them.

    python benchmarks/serving.py [--engines ours,openvino] [--shape llama] [--widths bf16,s8] [--clients 1,4,8,16]

Each client sends a request as soon as the one before is answered. Prompts are random; in the load `shared` they begin
alike, except for their last tokens. Decoding is greedy and ignores the end of a sequence. Weights, environments and
converted files are those of benchmarks/cpu.py. Each measurement is a process; engines take turns, so that those which
are compared run within minutes of each other. A run that was stopped goes on with the measurements that are missing in
its `--out`.
"""

from __future__ import annotations

import argparse
import json
import statistics
from itertools import product
from pathlib import Path

from cpu import CACHE, PeerError, Work, listed
from peers import PEERS
from peers.checkpoint import SHAPES
from peers.results import machine
from tqdm import tqdm

ABOUT = machine()
HALF = "bf16" if "avx512_bf16" in ABOUT["instructions"] else "f16"  # what llama.cpp multiplies fastest here
EIGHT = "s8" if "amx_tile" in ABOUT["instructions"] else "s8 a8"  # with which prompts are faster: tiles take 16 bits
FORMATS = {
    "ours": dict(bf16="bf16", s8=EIGHT),
    "ours over HTTP": dict(bf16="bf16", s8=EIGHT),
    "openvino": dict(bf16="bf16", s8="int8"),
    "llama.cpp server": dict(bf16=HALF, s8="q8_0"),
    "vllm": dict(bf16="bf16", s8="int8"),
}
ENGINES = tuple(FORMATS)
LOADS = ("random", "shared")
OWN = 24  # last tokens of a prompt that begins like the others
COLUMNS = ("tokens/s", "first p50", "first p99", "between p50", "between p99")


def tasks(arguments):
    """Yield what is measured, in turns: each engine once in a round."""
    sizes = dict(prompt=arguments.prompt, count=arguments.new)
    numbers = list(zip(arguments.clients, arguments.each, strict=True))
    for number, load, width, (clients, each) in product(
        range(arguments.rounds), arguments.loads, arguments.widths, numbers
    ):
        shared = arguments.prompt - OWN if load == "shared" else 0
        for engine in arguments.engines:
            about = dict(
                round=number, load=load, width=width, clients=clients, each=each, prompt=arguments.prompt,
                new=arguments.new, engine=engine, format=FORMATS[engine][width],
            )  # fmt: skip
            yield about, dict(do="serve", shared=shared, clients=clients, each=each) | sizes


def table(runs):
    """Return the medians of all rounds, in milliseconds, as Markdown."""
    lines = ["| load | width | clients | engine | " + " | ".join(COLUMNS) + " |", "|---" * 4 + "|---:" * 5 + "|"]
    names = ("load", "width", "clients", "engine")
    for row in dict.fromkeys(tuple(run[name] for name in names) for run in runs):
        same = [run for run in runs if tuple(run[name] for name in names) == row]
        if error := next((run["error"] for run in same if "error" in run), None):
            lines.append(f"| {' | '.join(map(str, row))} | {error} |" + " |" * 4)
            continue
        rate, *waits = [statistics.median(run[column] for run in same) for column in COLUMNS]
        cells = [*row, f"{rate:.1f}", *(f"{wait:.0f}" for wait in waits)]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main():
    def numbers(text):
        return [int(number) for number in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=listed(ENGINES), default=list(ENGINES), help=", ".join(ENGINES))
    parser.add_argument("--shape", choices=SHAPES, default="llama")
    parser.add_argument("--widths", type=listed(FORMATS["ours"]), default=["bf16", "s8"])
    parser.add_argument("--loads", type=listed(LOADS), default=list(LOADS))
    parser.add_argument("--clients", type=numbers, default=[1, 4, 8, 16])
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=128, help="tokens of an answer")
    parser.add_argument(
        "--each", type=numbers, help="requests of a client for each of these; by default 4 if 1, else 2"
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--work", default=CACHE, help="where environments and converted files are kept")
    parser.add_argument("--out", help="JSON file for all measurements; those that it has are not repeated")
    parser.add_argument("--timeout", type=int, default=3600, help="seconds that one process may take")
    arguments = parser.parse_args()
    arguments.each = arguments.each or [4 if clients == 1 else 2 for clients in arguments.clients]
    if len(arguments.each) != len(arguments.clients):
        parser.error(
            f"--each needs a number for each of --clients, {len(arguments.clients)}, got {len(arguments.each)}"
        )
    out = Path(arguments.out) if arguments.out else None
    runs = json.loads(out.read_text()) if out and out.exists() else []
    missing = [
        (about, task) for about, task in tasks(arguments) if not any(about.items() <= run.items() for run in runs)
    ]
    work = Work(arguments.work, None, [], arguments.timeout)
    work.checkpoint(arguments.shape)
    where = dict(processor=ABOUT["processor"], instructions=ABOUT["instructions"])
    for about, task in (bar := tqdm(missing, leave=False)):
        bar.set_postfix_str(" ".join(map(str, about.values())))
        engine, kind = about["engine"], about["format"]
        try:
            if PEERS[engine].requirements:
                work.prepare(arguments.shape, engine, kind)
            runs.append(about | work.call(engine, work.task(arguments.shape, engine, kind) | task) | where)
        except PeerError as failure:
            runs.append(about | where | dict(error=str(failure)))
            tqdm.write(f"{about}: {failure}")
        if out:
            out.write_text(json.dumps(runs, indent=1) + "\n")
    print(table(runs))


if __name__ == "__main__":
    main()
