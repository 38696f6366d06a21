"""Every environment variable the package reads or sets: name, default, meaning. No other file touches `os.environ`."""

from __future__ import annotations

import os
from typing import NamedTuple


class Variable(NamedTuple):
    name: str
    default: str
    meaning: str

    def get(self) -> str:
        return os.environ.get(self.name, self.default)

    @property
    def given(self) -> bool:
        """Whether the user has set it."""
        return self.name in os.environ

    def set_default(self) -> None:
        """Set the variable for the libraries below, unless the user has."""
        os.environ.setdefault(self.name, self.default)


RUNTIME = Variable(
    "NEURONX_RUNTIME",
    "",
    "Where programs run when NeuronConfig does not say: cpu, cuda or neuron. By default neuron where there is a device "
    "and torch_neuronx, otherwise cpu.",
)
KERNELS = Variable(
    "NEURONX_KERNELS",
    "auto",
    "Kernels for the CPU: auto, off, or portable, avx2, avx512, avx512_bf16, amx where they run.",
)
CACHE = Variable("NEURONX_CACHE", "on", "Whether compiled programs are kept for the next process: on or off.")
CACHE_DIR = Variable("NEURONX_CACHE_DIR", "", "Where they are kept; by default transformers_neuronx in XDG_CACHE_HOME.")
CACHE_HOME = Variable("XDG_CACHE_HOME", "~/.cache", "Where programs keep what they can make again.")
DUMP_TO = Variable("NEURONX_DUMP_TO", "", "A directory for the HLO of every program, before and after XLA, and a log.")
XLA_FLAGS = Variable("XLA_FLAGS", "", "XLA's own options. Read only to tell executables apart.")
CC_FLAGS = Variable("NEURON_CC_FLAGS", "", "Options for neuronx-cc, besides or in place of this package's own.")
PLATFORM_TARGET = Variable(
    "NEURON_PLATFORM_TARGET_OVERRIDE", "", "The kind of instance to compile for, where NEURON_CC_FLAGS has no --target."
)
COMPILE_TIMEOUT = Variable("NEURONX_COMPILE_TIMEOUT", "14400", "Seconds for neuronx-cc to compile a program, or 0.")
PYTHONPATH = Variable("PYTHONPATH", "", "Where Python finds modules. A child that compiles gets this package's place.")
LOG_LEVEL = Variable("TF_CPP_MIN_LOG_LEVEL", "1", "XLA's own log: 0 everything, 1 warnings, 2 errors. Set, not read.")
VISIBLE_CORES = Variable("NEURON_RT_VISIBLE_CORES", "", "NeuronCores that this process may use: 0-3,6. Read only.")
NUM_CORES = Variable("NEURON_RT_NUM_CORES", "", "How many NeuronCores this process may use. Read only.")


def for_child(*places: str) -> dict[str, str]:
    """The environment of a process in another directory. Its Python finds modules where ours does, and in `places`."""
    found = [os.path.abspath(place) for place in PYTHONPATH.get().split(os.pathsep) if place]
    return os.environ | {PYTHONPATH.name: os.pathsep.join([*found, *places])}
