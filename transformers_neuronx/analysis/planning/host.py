"""Memory and processors of this machine, and its speed, measured with the engine's own products."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from transformers_neuronx import hlo
from transformers_neuronx.compiler import compile_py_func
from transformers_neuronx.layers.linear import linear
from transformers_neuronx.pyhlo import HloScribe, Tensor, dtype_named
from transformers_neuronx.pyhlo.dtypes import element_type
from transformers_neuronx.runtimes import get_runtime
from transformers_neuronx.weights.parameters import declare
from transformers_neuronx.weights.quantization import in_panels
from transformers_neuronx.weights.rows import COLUMNS, linear as rows_of_linear

BYTES = 256 * 2**20  # of the matrix: larger than the CPU's caches
FEATURES = 4096
MANY = 128  # rows: enough that arithmetic takes longer than reading the matrix
SECONDS = 0.5  # to repeat each measurement for

CGROUP = Path("/sys/fs/cgroup")


def processors() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_memory() -> int:
    """Return the bytes that programs can use without swapping, within the limit of a container."""
    try:
        facts = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        available = int(facts["MemAvailable"].split()[0]) * 1024
    except OSError:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = int((CGROUP / "memory.max").read_text())
        used = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())["anon"]
    except (OSError, ValueError, KeyError):  # no limit
        return available
    return min(available, limit - int(used))


def rates_of_cpu(amp: str) -> tuple[float, float]:
    """Return the highest bytes read and FLOPs per second of all processors together, for type `amp`.

    They are measured on a linear layer of BYTES, with one row of activations and with MANY.
    """
    runtime = get_runtime("cpu", 1)
    outputs = BYTES * 8 // element_type(amp).bits // FEATURES
    table = rows_of_linear("layer", "", outputs, FEATURES, COLUMNS, bias=False)
    table = in_panels(table, amp) if runtime.panels else table

    def random(shape: tuple[int, ...]) -> Any:  # zeros would be multiplied faster
        block = np.random.default_rng(0).standard_normal(2**16).astype(element_type(amp).numpy)
        return runtime.put([np.resize(block, shape)])

    def seconds(rows: int) -> float:
        def program(scribe: HloScribe) -> Tensor:
            parameters = hlo.Parameters()
            x = parameters.add(dtype_named(amp)[rows, FEATURES], "x")
            return linear(x, declare(table, parameters, amp, 1).layer)

        executable, x = runtime.compile(compile_py_func(program)), random((rows, FEATURES))
        return _least(lambda: executable(x, weight)[0].numpy())

    weight = random(table[0].held(1))
    return weight.nbytes / seconds(1), 2 * MANY * outputs * FEATURES / seconds(MANY)


def _least(way: Callable[[], object]) -> float:
    """Return the least seconds of repeated runs, for SECONDS and at least three times: the first may be slower."""
    taken: list[float] = []
    while len(taken) < 3 or sum(taken) < SECONDS:
        began = time.perf_counter()
        way()
        taken.append(time.perf_counter() - began)
    return min(taken)
