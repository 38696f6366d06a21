"""Draw what a token costs when a model is divided between hosts: as measured, and by the formula of `plan` to 16 hosts.

    python benchmarks/hosts_chart.py benchmarks/results/hosts.svg

The measured ones are the committed results of benchmarks/between_hosts.py.
"""

import argparse
import json

import matplotlib
from chart import RESULTS
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, ScalarFormatter

from transformers_neuronx.analysis.planning import OVERHEAD, Core, Network, Work

TRIPS = (0.05, 0.15, 0.5, 1.5)  # milliseconds to another host and back
COLORS = ("#0b6e4f", "#2a78d6", "#c9730b", "#b3261e")
HOSTS = range(1, 17)
LAYERS, HIDDEN, BYTES = 80, 8192, 141e9  # Llama-3.3-70B in bf16
HOST = Core(memory=256e9, bandwidth=300e9, peak=20e12)
LINE = 10e9 / 8  # bytes a second


def predicted(alone, work, hosts, row):
    """Milliseconds of the formula for what was measured as `row`."""
    rate = (row["gigabits"] or 1e6) * 1e9 / 8
    return alone + 1e3 * Work(**work).seconds_between(hosts, Network(row["round_trip_ms"] / 1e3, rate))


def compared(found, what):
    """Yield hosts, round trip, gigabits, measured and predicted milliseconds of a "token" or a "prompt"."""
    alone = {each["devices"]: each[f"{what}_ms"] for each in found["alone"] if each["processes"] == 1}
    for row in found["hosts"]:
        hosts = row["hosts"]
        guess = predicted(alone[hosts], found["work"][str(hosts)][what], hosts, row)
        yield hosts, row["round_trip_ms"], row["gigabits"], row[f"{what}_ms"], guess


def measured(axes, found):
    for hosts, color in zip(sorted({row["hosts"] for row in found["hosts"]}), COLORS, strict=False):
        rows = [row for row in compared(found, "token") if row[0] == hosts and row[2] is None]
        trips, got, guess = ([row[place] for row in rows] for place in (1, 3, 4))
        axes.plot(trips, guess, color=color, linewidth=1)
        axes.plot(trips, got, "o", color=color)
        axes.annotate(f"{hosts} hosts", (trips[-1], guess[-1]), xytext=(5, 0), textcoords="offset points", fontsize=8)
    axes.set_title(f"{found['model']}: measured (dots) and by the formula", fontsize=9)
    axes.set_xlabel("round trip, ms", fontsize=9)
    axes.set_ylabel("ms a token", fontsize=9)
    axes.set_xlim(0, 1.25 * max(row["round_trip_ms"] for row in found["hosts"]))
    axes.set_ylim(0)


def foretold(axes):
    for trip, color in zip(TRIPS, COLORS, strict=True):
        network = Network(trip / 1e3, LINE)
        times = []
        for hosts in HOSTS:
            received = 2 * LAYERS * HIDDEN * 2 * (hosts - 1)
            work = Work(BYTES / hosts, 2 * BYTES / 2 / hosts, 2 * LAYERS + 2, received)
            times.append(1e3 * (work.seconds(HOST) + work.seconds_between(hosts, network)))
        axes.plot(HOSTS, times, color=color)
        axes.annotate(f"{trip:g} ms", (16, times[-1]), xytext=(4, -3), textcoords="offset points", fontsize=8)
    alone = 1e3 * BYTES / HOST.bandwidth
    stages = [alone + 1e3 * (hosts - 1) * (TRIPS[1] / 2e3 + OVERHEAD) for hosts in HOSTS]
    axes.plot(HOSTS, stages, color="gray", linestyle="dashed")
    axes.annotate("layers in stages", (16, stages[-1]), xytext=(4, -3), textcoords="offset points", fontsize=8)
    axes.set_title("Llama-3.3-70B in bf16, hosts of 300 GB/s: by the formula", fontsize=9)
    axes.set_xlabel("hosts", fontsize=9)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks([1, 2, 4, 8, 16], [1, 2, 4, 8, 16])
    axes.set_yticks([200, 500, 1000, 2000, 5000])
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(0.95, 34)


def draw(found, path):
    matplotlib.rcParams["svg.hashsalt"] = "hosts"  # the same picture again is the same file
    figure = Figure(figsize=(9, 3.6), layout="constrained", facecolor="white")
    left, right = figure.subplots(1, 2)
    measured(left, found)
    foretold(right)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    figure.savefig(path, metadata={"Date": None})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", help="the picture to write, .svg or .png")
    found = json.loads((RESULTS / "between_hosts.json").read_text())
    for what in ("token", "prompt"):
        for hosts, trip, gigabits, got, guess in compared(found, what):
            line = f"{what:6} {hosts} hosts, round trip {trip:5.2f} ms, {gigabits or 'no limit'} Gbit/s:"
            print(f"{line} {got:8.2f} ms, by the formula {guess:8.2f}: {guess / got:.2f}")
    draw(found, parser.parse_args().path)


if __name__ == "__main__":
    main()
