"""Compare the kernels here with those of a commit: milliseconds on one core, and how many times as fast these are.

    python benchmarks/kernel_times.py [--against HEAD] [--level amx] [--only attention]

Both are compiled with the flags of `setup.py` into libraries that one process calls in turns. Prints the median of the
ratios of two successive calls, so that a changing clock or a busy neighbour affects both, with the quartiles. There are
six weights, used in turns, so that they do not come from the nearest caches.
"""

import argparse
import ctypes
import itertools
import os
import runpy
import statistics
import subprocess
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np

from transformers_neuronx.runtimes import kernels

ROOT = Path(__file__).parents[1]
SHIM = Path(__file__).with_suffix(".cc")
SOURCES = ("attention", "linear", "memory")
TYPES = {"f32": 0, "bf16": 1, "f16": 2, "s8": 3, "s4": 4}  # as in kernels.h
BITS = {"f32": 32, "bf16": 16, "f16": 16, "s8": 8, "s4": 4}
# Activations, weights, inputs with one scale (0: all inputs of an output), inputs that are rounded together (0: none).
KINDS = [
    ("f32", "f32", 0, 0), ("bf16", "bf16", 0, 0), ("f16", "f16", 0, 0), ("f32", "s8", 0, 0), ("bf16", "s8", 0, 0),
    ("bf16", "s4", 32, 0), ("f32", "s8", 32, 32), ("bf16", "s4", 32, 32),
]  # fmt: skip
ROWS, SIZES = (1, 4, 8, 64, 512), ((768, 3072), (3072, 768), (1024, 1024))
# Rows with a token each, positions before it, heads, those of keys, features; and positions that all rows share.
TOKENS = (
    (1, 1023, 12, 12, 64, 0), (1, 4095, 32, 8, 64, 0), (1, 4095, 32, 8, 128, 0), (16, 1023, 32, 8, 64, 0),
    (16, 1023, 32, 8, 64, 960),
)  # fmt: skip
HEADS = ((128, 12, 64), (512, 12, 64), (577, 12, 64), (256, 8, 128))  # tokens, heads, features of one
PAGE = 64  # positions
WEIGHTS, SECONDS = 6, 0.4


def compiled(tree, level, directory):
    """Compile the sources in a tree. Returns the library."""
    with mock.patch("setuptools.setup"):
        flags = runpy.run_path(str(ROOT / "setup.py"))
    sources = [SHIM, *(tree / flags["KERNELS"] / f"{name}.cc" for name in SOURCES)]
    library = Path(directory) / "kernels.so"
    options = [*sysconfig.get_config_var("CFLAGS").split(), *flags["FLAGS"], *flags["LEVELS"][level]]
    command = [os.environ.get("CXX", "g++"), *options, "-w", "-shared", "-fPIC", f"-DNEURONX_LEVEL={level}"]
    subprocess.run([*command, f"-I{tree / flags['KERNELS']}", *sources, "-o", library], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.linear.restype = ctypes.c_int64
    return loaded


def numbers(name, count):
    """Return random numbers of a type, aligned to a cache line."""
    rng = np.random.default_rng(0)
    if name in ("s8", "s4"):
        wanted = rng.integers(0, 256, count * BITS[name] // 8, np.uint8)
    else:
        wanted = rng.uniform(-1, 1, count).astype(np.float16 if name == "f16" else np.float32)
        wanted = (wanted.view(np.uint32) >> 16).astype(np.uint16) if name == "bf16" else wanted
    room = np.zeros(wanted.nbytes + 64, np.uint8)
    aligned = room[-room.ctypes.data % 64 :][: wanted.nbytes]
    aligned[:] = wanted.view(np.uint8)
    return aligned


def pointer(array):
    return None if array is None else ctypes.c_void_p(array.ctypes.data)


def linear_layers():
    for kind, rows, sizes in itertools.product(KINDS, ROWS, SIZES):
        (activations, weight, _, rounded), (inputs, outputs) = kind, sizes
        name = f"{rows} x {inputs} x {outputs}, {activations}, weights in {weight}" + ", rounded" * bool(rounded)
        yield name, linear_layer(*kind, rows, inputs, outputs)


def linear_layer(activations, weight, group, rounded, rows, inputs, outputs):
    """Return a function that calls a library's linear layer once and returns the seconds that it took."""
    x, y = numbers(activations, rows * inputs), numbers("f32", rows * outputs)
    weights = itertools.cycle([numbers(weight, inputs * outputs) for _ in range(WEIGHTS)])
    scale = numbers("bf16" if weight == "s4" else "f32", outputs * (inputs // group if group else 1))
    shape = [*map(ctypes.c_int64, (rows, inputs, outputs, group, rounded)), TYPES[activations], TYPES[weight]]
    scratch = {}

    def call(library):
        given = [*shape, pointer(x), pointer(next(weights)), pointer(scale if BITS[weight] <= 8 else None)]
        if library not in scratch:
            scratch[library] = numbers("s8", library.linear(*given, None, None) + 64)
        began = time.perf_counter()
        library.linear(*given, pointer(scratch[library]), pointer(y))
        return time.perf_counter() - began

    return call


def attention():
    for name, (tokens, heads, size) in itertools.product(("f32", "bf16"), HEADS):
        yield f"{tokens} tokens, {heads} heads of {size}, {name}", attention_to(name, tokens, heads, size)


def attention_to(name, tokens, heads, size):
    arrays = [numbers(name, tokens * heads * size) for _ in range(3)]
    arrays += [numbers("f32", tokens), numbers(name, tokens * heads * size)]  # a bias, and contexts
    shape = [*map(ctypes.c_int64, (tokens, heads, size)), TYPES[name]]

    def call(library):
        began = time.perf_counter()
        library.attend_to(*shape, *map(pointer, arrays))
        return time.perf_counter() - began

    return call


def decoding():
    for name, (rows, before, heads, kv_heads, size, shared) in itertools.product(("f32", "bf16"), TOKENS):
        about = f"{rows} x a token after {before}, {heads} heads of {size} in {kv_heads}, {name}"
        yield about + f", {shared} shared" * bool(shared), attend(name, rows, before, heads, kv_heads, size, shared)


def attend(name, rows, before, heads, kv_heads, size, shared):
    most = before // PAGE + 1
    tables = np.arange(rows * most).reshape(rows, most)
    tables[:, : shared // PAGE] = tables[0, : shared // PAGE]
    head = np.stack([np.arange(rows), np.ones(rows), np.full(rows, before), np.zeros(rows)], 1)
    packed = np.concatenate([head, tables], 1).astype(np.int32)
    arrays = [packed, numbers(name, rows * heads * size), *(numbers(name, rows * kv_heads * size) for _ in range(2))]
    caches = itertools.cycle(
        [[numbers(name, rows * most * kv_heads * PAGE * size) for _ in range(2)] for _ in range(2)]
    )
    context = numbers(name, rows * heads * size)
    shape = [*map(ctypes.c_int64, (rows, heads, kv_heads, size, rows * most, most)), TYPES[name]]

    def call(library):
        given = [*shape, *map(pointer, (*arrays, *next(caches), context))]
        began = time.perf_counter()
        library.attend(*given)
        return time.perf_counter() - began

    return call


class Ratio(NamedTuple):
    """How many times as fast the first of two things is: the median of all pairs of calls, and the quartiles."""

    low: float
    middle: float
    high: float
    times: list[float]  # the median of each

    @classmethod
    def of(cls, pairs):
        quartiles = statistics.quantiles([theirs / ours for ours, theirs in pairs], method="inclusive")
        return cls(*quartiles, [statistics.median(each) for each in zip(*pairs, strict=True)])

    def __str__(self):
        return f"{self.middle:.2f} ({self.low:.2f} to {self.high:.2f})"


def in_pairs(call, things, count):
    """Call two things in turns. The second call of a pair finds more in the caches, so they change places."""
    found = []
    for turn in range(count):
        pair = list(map(call, things if turn % 2 else things[::-1]))
        found.append(pair if turn % 2 else pair[::-1])
    return found


def archive(commit, directory):
    """Put the files of a commit into a directory."""
    files = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    subprocess.run(["tar", "-x", "-C", directory], input=files, check=True)


def comparisons(there, level, only=None):
    """Yield the name of each call, and its ratio: of the kernels here to those of another tree."""
    with tempfile.TemporaryDirectory() as ours, tempfile.TemporaryDirectory() as theirs:
        libraries = [compiled(ROOT, level, ours), compiled(Path(there), level, theirs)]
    for kind, calls in KERNELS.items():
        for name, call in calls() if only in (None, kind) else ():
            once = max(max(map(call, libraries)), 1e-6)
            yield f"{kind}, {name}", Ratio.of(in_pairs(call, libraries, max(15, int(SECONDS / once))))


KERNELS = dict(linear=linear_layers, attention=attention, decoding=decoding)


def main():
    levels = kernels.built().levels()  # of this processor
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", default="HEAD", help="a commit")
    parser.add_argument("--level", default=levels[-1], choices=levels)
    parser.add_argument("--only", choices=KERNELS)
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory() as there:
        archive(arguments.against, there)
        print(f"| {arguments.level} | here, ms | {arguments.against}, ms | times as fast |")
        print("|---|---|---|---|")
        for name, ratio in comparisons(there, arguments.level, arguments.only):
            ours, theirs = (f"{1e3 * each:.3f}" for each in ratio.times)
            print(f"| {name} | {ours} | {theirs} | {ratio} |", flush=True)


if __name__ == "__main__":
    main()
