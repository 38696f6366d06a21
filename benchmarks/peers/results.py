"""Measurements, kept in a file, and the tables that are made of them."""

import json
import os
import platform
import statistics
import time
from collections import Counter, defaultdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from peers import PEERS
from peers.checkpoint import SHAPES

INSTRUCTIONS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "asimd")
BATCH = 8
FAULTS = 1000  # pages that a process may read from the disk before its row is marked
NOTES = """
Medians of {rounds} processes, with the minimum and the maximum in brackets. Engines take turns. All
have {cores} threads. Weights are random, decoding is greedy, and the end of a sequence is ignored.

- Start: from the start of the process to the first token after a prompt of 16, with all files in memory. The step of
  `compile` is not compiled by then.
- Peak: VmHWM of the process with a single sequence, including mapped files.
- Of read: the bytes of the weights that a token reads, as the engine stores them, times tokens per second, relative to
  the {read:.1f} GB/s at which torch reads 1 GiB by the fastest of sum, maximum and scalar product. That is the maximum
  of {count} measurements, one before each run. Their median was {usual:.1f} and their minimum {slow:.1f}, which shows
  how much the machine itself varies.
- Of product: the operations of a prompt per second, relative to torch's product of [1024, 2048] and [2048, 8192]:
  {f32:.0f} GFLOP/s in f32, {bf16:.0f} in bf16. Formats other than f32 are compared with bf16.
- Eight rows: eight sequences at once, so a step gives eight tokens.
- Same: how many of the first tokens after all prompts are those of Transformers, in f32 if that was measured, else in
  bf16.
"""


class Results:
    """The measurements so far, written to a file if there is a path, so that an interrupted run leaves results."""

    def __init__(self, path, add):
        self.path = Path(path).resolve() if path else None
        self.all = dict(machine=machine(), date=time.strftime("%Y-%m-%d"), rates=[], runs=[], perplexity={})
        if add and self.path and self.path.exists():
            self.all |= json.loads(self.path.read_text())

    def add(self, where, result):
        self.all[where].append(result)
        self.write()

    def write(self):
        if self.path:
            self.path.write_text(json.dumps(self.all, indent=1) + "\n")

    def failed(self, row):
        """Whether the row has failed before, and would fail again."""
        return any("error" in run and row.items() <= run.items() for run in self.all["runs"])


def machine():
    facts = dict(processor=platform.machine(), cores=len(os.sched_getaffinity(0)), system=platform.platform())
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = (part.strip() for part in line.partition(":"))
        if name == "model name":
            facts["processor"] = value
        if name in ("flags", "Features"):
            facts["instructions"] = [known for known in INSTRUCTIONS if known in value.split()]
    facts["memory"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    names = ("transformers-neuronx", "jaxlib", "torch", "transformers")
    return facts | dict(versions={"python": platform.python_version()} | {name: installed(name) for name in names})


def installed(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return "as in the source"


def report(results):
    about, rates = results["machine"], results["rates"]
    memory, instructions = about["memory"] / 2**30, ", ".join(about.get("instructions", []))
    lines = [
        f"# Engines on a CPU, {results['date']}", "",
        f"{about['processor']}, {about['cores']} cores ({instructions}), {memory:.1f} GiB, {about['system']}.", "",
    ]  # fmt: skip
    if rates:
        lines += [notes(results), ""]
    for name, shape in SHAPES.items():
        runs = [run for run in results["runs"] if run["shape"] == name]
        if runs:
            lines += [f"## {shape.title}", "", *Tables(shape, runs, rates).lines()]
    if results["perplexity"]:
        lines += ["## Accuracy", "", *perplexities(results["perplexity"]), ""]
    lines += ["## Versions", "", *versions(about, {run["engine"] for run in results["runs"]})]
    return "\n".join(lines) + "\n"


def notes(results):
    rates = results["rates"]
    best = {name: max(rate[name] for rate in rates) / 1e9 for name in rates[0]}
    times = Counter(
        (run["shape"], run["engine"], run["format"], run["rows"]) for run in results["runs"] if "rows" in run
    )
    read = [rate["read"] / 1e9 for rate in rates]
    varied = dict(count=len(read), usual=statistics.median(read), slow=min(read))
    return NOTES.format(rounds=span(times.values()), cores=results["machine"]["cores"], **varied, **best).strip()


def span(values):
    low, high = min(values, default=0), max(values, default=0)
    return str(low) if low == high else f"{low} to {high}"


class Tables:
    """Rows of one shape: of prompts and starts, and of tokens."""

    def __init__(self, shape, runs, rates):
        self.shape, self.rows, self.errors = shape, defaultdict(list), {}
        self.rates = {name: max(rate[name] for rate in rates) for name in rates[0]} if rates else {}
        for run in runs:
            where = run["engine"], run["format"]
            self.rows[where]  # the order is that of the runs
            if "error" in run:
                self.errors[where] = run["error"]
            else:
                self.rows[where].append(run)
        firsts = {where: self.firsts(where) for where in self.rows}
        self.reference = next((firsts[way] for way in (("eager", "f32"), ("eager", "bf16")) if firsts.get(way)), {})

    def lines(self):
        prompts = ["prompt of 16, ms", "of 128", "of 1024", "of product", "start, s", "peak, MiB"]
        tokens = ["weights, MiB", "a token, ms", "of read", "after 896", "of read"]
        tokens += ["eight rows, ms", "after 896", "same"]
        known = sorted(self.rows, key=lambda where: list(PEERS).index(where[0]))
        first = table(["engine", "format", *prompts], [[*where, *self.prompt(where)] for where in known])
        second = table(["engine", "format", *tokens], [[*where, *self.token(where)] for where in known])
        failed = [f"- {' '.join(where)}: {self.errors[where]}" for where in known if where in self.errors]
        for where in known:
            if faults := max(self.values(where, 1, "faults") + self.values(where, BATCH, "faults"), default=0):
                failed += [f"- {' '.join(where)}: pages were read from the disk {faults} times"] * (faults > FAULTS)
        return [*first, "", *second, "", *(["Not measured, or not reliably:", "", *failed, ""] if failed else [])]

    def values(self, where, rows, *path):
        """Return a value of every round."""
        found = []
        for run in self.rows[where]:
            if run["rows"] == rows:
                value = run
                for name in path:
                    value = value.get(name) if value else None
                found += [] if value is None else [value]
        return found

    def prompt(self, where):
        longest = self.values(where, 1, "prompt", "1024")
        rate = self.rates.get("f32" if where[1] == "f32" else "bf16")
        share = self.shape.operations(1024) / statistics.median(longest) / rate if longest and rate else None
        return [
            *(cell(self.values(where, 1, "prompt", length), 1e3) for length in ("16", "128", "1024")),
            share_of(share),
            cell(self.values(where, 1, "start")),
            cell(self.values(where, 1, "peak"), 2**-20, digits=0),
        ]

    def token(self, where):
        weights, cells = self.values(where, 1, "weights"), []
        for context in ("short", "long"):
            seconds = self.values(where, 1, "token", context)
            read = self.shape.read * weights[0] if seconds else 0
            share = read / statistics.median(seconds) / self.rates["read"] if seconds and self.rates else None
            cells += [cell(seconds, 1e3), share_of(share)]
        several = [cell(self.values(where, BATCH, "token", context), 1e3) for context in ("short", "long")]
        return [cell(weights[:1], 2**-20, digits=0), *cells, *several, self.same(where)]

    def firsts(self, where):
        """Return the first token of every row of every run."""
        found = {}
        for run in self.rows[where]:
            for name, tokens in run["firsts"].items():
                found |= {(name, row): token for row, token in enumerate(tokens)}
        return found

    def same(self, where):
        mine = self.firsts(where)
        both = mine.keys() & self.reference.keys()
        return f"{sum(mine[key] == self.reference[key] for key in both)} of {len(both)}" if both else ""


def cell(values, scale=1.0, digits=None):
    if not values:
        return ""
    middle, low, high = (scale * function(values) for function in (statistics.median, min, max))
    digits = max(0, 3 - len(str(int(middle)))) if digits is None else digits
    spread = f" ({low:.{digits}f}–{high:.{digits}f})" if len(values) > 1 else ""
    return f"{middle:.{digits}f}{spread}"


def share_of(share):
    return "" if share is None else f"{share:.2f}"


def table(head, rows):
    """Return lines of Markdown that are aligned, so that they are also readable as text."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = [" | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in [head, *rows]]
    return [f"| {line} |" for line in [lines[0], " | ".join("-" * width for width in widths), *lines[1:]]]


def perplexities(found):
    base = found.get("f32", {}).get("perplexity")
    rows = [
        [name, f"{one['perplexity']:.4f}", f"{one['perplexity'] / base - 1:+.2%}" if base else ""]
        for name, one in found.items()
    ]
    count = next(iter(found.values()))["tokens"]
    return [
        f"This project with the bundled checkpoint, on {count} held-out tokens.", "",
        *table(["format", "perplexity", "above f32"], rows),
    ]  # fmt: skip


def versions(about, engines):
    mine = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    lines = [f"- ours: {mine}"]
    return lines + [
        f"- {name}: {', '.join(peer.requirements)}"
        for name, peer in PEERS.items()
        if name in engines and peer.requirements
    ]
