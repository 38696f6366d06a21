"""The stand-in for `neuronx-cc` in tests: its path, its faults, its log of calls, and the processes that remain.

It is the file `neuronx-cc` next to this one, and no compiler.
"""

import json
import os
import sys
import time
from pathlib import Path

from transformers_neuronx import hlo
from transformers_neuronx.compiler import compile_py_func
from transformers_neuronx.pyhlo import dtype_named

SOURCE = Path(__file__).with_name("neuronx-cc")
LIBNEURONXLA = Path(__file__).with_name("stand_ins")  # must be on `sys.path` for libneuronxla
MAGIC = b"stand-in NEFF 1\n"
# Variables that change how or where the compiler is called: tests start without them.
VARIABLES = ("NEURON_CC_FLAGS", "NEURON_PLATFORM_TARGET_OVERRIDE", "NEURONX_COMPILE_TIMEOUT", "NEURONX_DUMP_TO")


def install(folder):
    """Install a copy in a folder as the program `neuronx-cc`, run by this Python."""
    folder.mkdir()
    program = folder / SOURCE.name
    program.write_text(f"#!{sys.executable}\n" + SOURCE.read_text().partition("\n")[2])
    program.chmod(0o755)
    return program


class StandIn:
    """`log` has a line for each run; `temporary` is where temporary directories are made."""

    def __init__(self, program, log, temporary):
        self.program, self.log, self.temporary = program, log, temporary

    def notes(self, event):
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [note for note in map(json.loads, lines) if note["event"] == event]

    def processes(self):
        """Return the running processes of the stand-in and their children: they have its log in the environment."""
        mark = f"STANDIN_NEURONX_CC_LOG={self.log}".encode()
        return [int(place.name) for place in Path("/proc").glob("[0-9]*") if _has(place, mark)]


def _has(place, mark):
    try:
        # The test's own process may have it as well.
        return int(place.name) != os.getpid() and mark in (place / "environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or is another user's
        return False


def doubling(size=4, name="doubling"):
    def double(_):
        return hlo.multiply(dtype_named("f32")[size].Parameter(parameter_number=0), 2.0)

    module = compile_py_func(double)
    module.name = name
    return module


def binary(module):
    return MAGIC + module.SerializeToString(deterministic=True)


def soon(condition, seconds=60):
    """Wait for a condition that another process fulfils."""
    until = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < until:
        time.sleep(0.02)
    return found


def gone(standin):
    """Whether no process of the stand-in runs. Killed ones need a moment."""
    return soon(lambda: not standin.processes(), 10)
