"""What every peer's process does: it prepares files, or measures, and prints one line of JSON.

    python -P -m peers.NAME '{"do": "prepare" or "measure", …}'

A task has the `checkpoint`, the peer's own `directory`, the `format` and the `threads`. To measure, it also has the
`rows` of the batch, the `vocab`, the available `positions`, and the lengths of prompts. A peer's `load(task)` returns
an engine with two members. `weights` is the number of bytes that one token reads. `generate(ids, count)` decodes
greedily, and returns the tokens of each row, the seconds to the first token, and the seconds of all others together.
"""

import itertools
import json
import os
import random
import resource
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
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


def serve(task, server):
    """Let `task.clients` send `task.each` requests, one after the other each. Return what they saw, in milliseconds.

    `server.answer(ids, count)` yields once for each token, in the thread of its caller. Prompts begin with the same
    `task.shared` tokens, and are new for each request, so that nothing else of them is cached. Before that, each
    client sends a request that warms up: a server may keep the common beginning once for each client.
    """
    draw = random.Random(task.clients)
    warm = task.clients if task.shared else 1
    ends = [
        [draw.randrange(task.vocab) for _ in range(task.prompt - task.shared)]
        for _ in range(warm + task.clients * task.each)
    ]
    common = [draw.randrange(task.vocab) for _ in range(task.shared)]
    with ThreadPoolExecutor(warm) as pool:
        list(pool.map(lambda ids: list(server.answer(common + ids, 4)), ends[:warm]))
    own = ends[warm:]
    times = []

    # A request counts from when its client is free. An engine that holds Python's lock would keep clients from sending.
    def client(number):
        ready.wait()
        free = began
        for ids in own[number :: task.clients]:
            came = [free, *(time.perf_counter() for _ in server.answer(common + ids, task.count))]
            times.append(came)
            free = came[-1]

    ready = threading.Event()
    threads = [threading.Thread(target=client, args=[number]) for number in range(task.clients)]
    for thread in threads:
        thread.start()
    began = time.perf_counter()
    ready.set()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    assert [len(came) for came in times] == [1 + task.count] * len(own), "all tokens of all requests"
    first = sorted(came[1] - came[0] for came in times)
    between = sorted(b - a for came in times for a, b in itertools.pairwise(came[1:]))
    found = {"tokens/s": task.count * len(own) / seconds, "peak": peak()}
    for name, values in dict(first=first, between=between).items():
        for part in (50, 99):
            found[f"{name} p{part}"] = 1e3 * values[min(len(values) * part // 100, len(values) - 1)]
    return found


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


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
