"""Draw the committed results of benchmarks/serving.py: output tokens a second against the number of clients.

    python benchmarks/serving_chart.py benchmarks/results/serving.svg [--results benchmarks/results/serving.json]

Each point is the median of all rounds. The dotted line is ours over HTTP.
"""

import argparse
import json
import statistics
from itertools import product
from pathlib import Path

import matplotlib
from chart import ENGINES, RESULTS
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

LOADS = {"random": "prompts of 1,024 random tokens", "shared": "prompts that share 1,000 tokens"}
WIDTHS = {"bf16": "16 bits", "s8": "8 bits"}
PEERS = {
    "ours": "ours",
    "ours over HTTP": "ours",
    "openvino": "openvino",
    "llama.cpp server": "llama.cpp",
    "vllm": "vllm",
}


def rates(runs, load, width, engine):
    """Tokens a second by the number of clients."""
    found = {}
    for run in runs:
        if (run["load"], run["width"], run["engine"]) == (load, width, engine) and "error" not in run:
            found.setdefault(run["clients"], []).append(run["tokens/s"])
    return {clients: statistics.median(each) for clients, each in sorted(found.items())}


def draw(runs, path):
    matplotlib.rcParams["svg.hashsalt"] = "serving"  # the same picture again is the same file
    figure = Figure(figsize=(9, 5.4), layout="constrained", facecolor="white")
    places = figure.subplots(len(LOADS), len(WIDTHS), sharex=True, sharey="row")
    for axes, (load, width) in zip(places.flat, product(LOADS, WIDTHS), strict=True):
        for engine, style in PEERS.items():
            label, color = ENGINES[style]
            if not (found := rates(runs, load, width, engine)):
                continue
            http = engine == "ours over HTTP"
            how = dict(linestyle="dotted", linewidth=1) if http else dict(linewidth=2 + (engine == "ours"))
            axes.plot(*zip(*found.items(), strict=True), marker="o", markersize=4, color=color, **how)
            if http:  # it is told from its color, and beside the other line
                continue
            clients, rate = [*found.items()][-1]
            axes.annotate(
                f"{label} {rate:.3g}", (clients, rate), xytext=(6, 0), textcoords="offset points", va="center",
                fontsize=8, fontweight="bold" if engine == "ours" else "normal",
            )  # fmt: skip
        axes.set_title(f"{WIDTHS[width]}, {LOADS[load]}", fontsize=9)
        axes.set_xscale("log", base=2)
        axes.set_xticks(clients := sorted({run["clients"] for run in runs}), map(str, clients))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlim(clients[0] * 0.9, clients[-1] * 3.2)
        axes.set_ylim(0, 1.08 * max(run["tokens/s"] for run in runs if run["load"] == load and "error" not in run))
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("clients", fontsize=9)
    figure.supylabel("output tokens a second", fontsize=9)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", help="the picture to write, .svg or .png")
    parser.add_argument("--results", default=RESULTS / "serving.json", type=Path, help="what serving.py wrote")
    arguments = parser.parse_args()
    draw(json.loads(arguments.results.read_text()), arguments.path)
