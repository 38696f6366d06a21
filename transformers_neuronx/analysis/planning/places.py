"""Where a model may run: the number of cores, and the memory, bandwidth and peak of each.

Numbers of AWS's instances and NVIDIA's GPUs are as published; those of this machine's CPU are measured.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, replace
from typing import NamedTuple

from transformers_neuronx.analysis.inspection.text import scaled
from transformers_neuronx.analysis.planning.host import available_memory, processors, rates_of_cpu
from transformers_neuronx.neuron.targets import TARGETS

GIB = 2**30
CPU, CUDA = "cpu", "cuda"


@dataclass(frozen=True)
class Core:
    """One of the devices that share a model: bytes, bytes per second and FLOPs per second; None if unknown."""

    memory: float
    bandwidth: float | None
    peak: float | None


@dataclass(frozen=True)
class Place:
    """A place with devices for any of these `degrees`. `told` is a note on it for people.

    If the devices are parts of one, as on the CPU, any degree is possible, and `core` is all of them `together`.
    """

    name: str
    degrees: tuple[int, ...]
    core: Core
    told: str = ""
    together: bool = False

    def share(self, degree: int) -> Core:
        """Return what each of `degree` devices has."""
        return Core(*(value and value / degree for value in astuple(self.core))) if self.together else self.core


class Chip(NamedTuple):
    """One accelerator: cores, bytes, bytes per second, and dense FLOPs per second in 16 bits and in f32."""

    cores: int
    memory: float
    bandwidth: float
    half: float
    single: float

    def core(self, amp: str) -> Core:
        peak = self.single if amp == "f32" else self.half
        return Core(self.memory / self.cores, self.bandwidth / self.cores, peak / self.cores)


# From the Neuron documentation's pages on Trainium, Inferentia2 and Trainium2. A chip of the first generation has two
# cores with 16 GiB each. One of the second has eight, used in pairs by default: four logical cores with 24 GiB each.
FIRST = Chip(2, 32 * GIB, 0.82e12, 190e12, 47.5e12)
SECOND = Chip(4, 96 * GIB, 2.9e12, 667e12, 181e12)

INSTANCES: Mapping[str, tuple[Chip, int, str]] = {  # chip, number of cores, the compiler's name
    "inf2.xlarge": (FIRST, 2, "inf2"),
    "inf2.8xlarge": (FIRST, 2, "inf2"),
    "inf2.24xlarge": (FIRST, 12, "inf2"),
    "inf2.48xlarge": (FIRST, 24, "inf2"),
    "trn1.2xlarge": (FIRST, 2, "trn1"),
    "trn1.32xlarge": (FIRST, 32, "trn1"),
    "trn1n.32xlarge": (FIRST, 32, "trn1"),
    "trn2.48xlarge": (SECOND, 64, "trn2"),
}

# From NVIDIA's data sheets, without sparsity, with TF32 for f32 where available. Keys are nvidia-smi's names after
# "NVIDIA". Memory is 0 here: nvidia-smi says how much is free.
GPUS: Mapping[str, Chip] = {
    "H200": Chip(1, 0, 4.8e12, 989e12, 494e12),
    "H100 80GB HBM3": Chip(1, 0, 3.35e12, 989e12, 494e12),
    "H100 PCIe": Chip(1, 0, 2.0e12, 756e12, 378e12),
    "A100-SXM4-80GB": Chip(1, 0, 2.039e12, 312e12, 156e12),
    "A100 80GB PCIe": Chip(1, 0, 1.935e12, 312e12, 156e12),
    "A100-SXM4-40GB": Chip(1, 0, 1.555e12, 312e12, 156e12),
    "A100-PCIE-40GB": Chip(1, 0, 1.555e12, 312e12, 156e12),
    "L40S": Chip(1, 0, 0.864e12, 362e12, 183e12),
    "L4": Chip(1, 0, 0.3e12, 121e12, 60e12),
    "T4": Chip(1, 0, 0.32e12, 65e12, 8.1e12),
}


def instance(name: str, amp: str) -> Place:
    """Return an AWS instance by name, one of INSTANCES, for a model with activations of this type."""
    chip, cores, target = INSTANCES[name]
    return Place(name, tuple(degree for degree in TARGETS[target].degrees if degree <= cores), chip.core(amp))


def cpu(amp: str) -> Place:
    """Return this machine's CPU, with the memory that is free, and rates that are measured now."""
    bandwidth, peak = rates_of_cpu(amp)
    rates = f"{scaled(bandwidth, 'B/s')} and {scaled(peak, 'FLOP/s')} measured with a linear layer in {amp}"
    told = f"{processors()} processors, memory free now; {rates}"
    return Place(CPU, (1,), Core(available_memory(), bandwidth, peak), told, together=True)


def cuda(amp: str) -> Place | None:
    """Return this machine's GPUs of the same kind as the first, with the memory that is free on each; or None."""
    command = ["nvidia-smi", "--query-gpu=name,memory.free", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    gpus = [line.rpartition(",") for line in listed.splitlines() if line.strip()]
    alike = [int(free) * 2**20 for name, _, free in gpus if name == gpus[0][0] and free.strip().isdecimal()]
    if not alike:
        return None
    name = gpus[0][0]
    chip = next((chip for part, chip in GPUS.items() if f" {part} " in f" {name} "), None)
    core = replace(chip.core(amp), memory=min(alike)) if chip else Core(min(alike), None, None)
    told = f"{len(alike)} × {name}, memory free now" + ("" if chip else "; its speed is unknown")
    return Place(CUDA, tuple(range(1, len(alike) + 1)), core, told)


HERE: Mapping[str, Callable[[str], Place | None]] = {CPU: cpu, CUDA: cuda}
NAMES = (*HERE, *INSTANCES)


def place(name: str, amp: str) -> Place | None:
    """Return the place with this name, one of NAMES; None if this machine does not have it."""
    return HERE[name](amp) if name in HERE else instance(name, amp)
