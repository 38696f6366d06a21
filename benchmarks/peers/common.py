"""What every peer's process does: it prepares files, or measures, and prints one line of JSON.

    python -P -m peers.NAME '{"do": "prepare" or "measure", …}'

A task has the `checkpoint`, the peer's own `directory`, the `format` and the `threads`. To measure, it also has the
`rows` of the batch, the `vocab`, the available `positions`, and the lengths of prompts. A peer's `load(task)` returns
an engine with two members. `weights` is the number of bytes that one token reads. `generate(ids, count)` decodes
greedily, and returns the tokens of each row, the seconds to the first token, and the seconds of all others together.
"""

import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from collections import Counter
from types import SimpleNamespace

ENOUGH = 5  # seconds after which a measurement is not repeated within a process


def run(prepare, load, **others):
    """Do what the task says: prepare, measure, nothing, or one of `others`, which are a peer's own."""
    task = SimpleNamespace(**json.loads(sys.argv[1]))
    verbs = dict(nothing=lambda task: None, prepare=prepare, measure=lambda task: measure(task, load(task))) | others
    result = verbs[task.do](task)
    print("\n" + json.dumps(result or {}), flush=True)
    os._exit(0)  # skips what engines do at their end


def measure(task, engine):
    session = Session(task, engine)
    session.generate(task.start, 1)
    result = dict(start=since_start(), prompt={}, token={})
    for length in task.prompt:
        runs = session.repeat(length, 1)
        result["prompt"][length] = statistics.median(first for first, _ in runs)
    for name, length in task.token.items():
        runs = session.repeat(length, task.count)
        result["token"][name] = statistics.median(rest for _, rest in runs) / (task.count - 1)
    result["peak"], result["faults"] = peak(), resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    return result | dict(weights=engine.weights, firsts=session.firsts)


def convert(module, *arguments):
    """Run another package's converter as a command. If it fails, exit with its status."""
    status = subprocess.run([sys.executable, "-P", "-m", module, *arguments], stdout=sys.stderr).returncode
    if status:
        sys.exit(status)


class Session:
    """Runs of an engine on random prompts: new ones each time, so that none is cached, and the same for all engines.

    `firsts` are the first tokens of each run, by which engines are compared.
    """

    def __init__(self, task, engine):
        self.task, self.engine = task, engine
        self.firsts, self.calls = {}, Counter()

    def generate(self, length, count):
        name = f"{self.task.rows} x {length}, {self.calls[length]}"
        self.calls[length] += 1
        draw = random.Random(name)
        ids = [[draw.randrange(self.task.vocab) for _ in range(length)] for _ in range(self.task.rows)]
        tokens, first, rest = self.engine.generate(ids, count)
        lengths = [len(row) for row in tokens]
        assert lengths == [count] * self.task.rows, f"{count} tokens for each of {self.task.rows} rows, got {lengths}"
        self.firsts[name] = [int(row[0]) for row in tokens]
        return first, rest

    def repeat(self, length, count):
        """Return several runs without the first, which warms up, unless one takes so long that it is enough."""
        runs, began = [], time.perf_counter()
        while len(runs) <= self.task.repeats and (not runs or time.perf_counter() - began < ENOUGH):
            runs.append(self.generate(length, count))
        return runs[1:] or runs


class Clock:
    """Measures the time to the first token, and to all tokens."""

    def __init__(self):
        self.began, self.first = time.perf_counter(), None

    def token(self):
        """Note that there is a token. Only the first one counts."""
        if self.first is None:
            self.first = time.perf_counter()

    def seconds(self):
        self.token()
        return self.first - self.began, time.perf_counter() - self.first


def since_start():
    """Return the seconds since this process was started, to a hundredth."""
    with open("/proc/self/stat") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def peak():
    """Return the most bytes of memory that this process had, including mapped files."""
    with open("/proc/self/status") as file:
        [line] = [line for line in file if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024
