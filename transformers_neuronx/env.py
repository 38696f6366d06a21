"""Every environment variable that the package uses: name, default, meaning. No other file accesses `os.environ`."""

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
        """Whether the user has set the variable."""
        return self.name in os.environ

    def set_default(self) -> None:
        """Set the variable for the libraries that we load, unless the user has set it."""
        os.environ.setdefault(self.name, self.default)


RUNTIME = Variable(
    "NEURONX_RUNTIME",
    "",
    "Where programs run if NeuronConfig does not say: cpu, cuda or neuron. The default is neuron if there is a device "
    "and torch_neuronx, otherwise cpu.",
)
KERNELS = Variable(
    "NEURONX_KERNELS",
    "auto",
    "Kernels for the CPU: auto, off, or one of portable, avx2, avx512, avx512_bf16, amx, and on ARM neon_dot and "
    "neon_bf16, that the processor supports.",
)
CACHE = Variable(
    "NEURONX_CACHE", "on", "Whether programs and configurations are cached for later processes: on or off."
)
CACHE_DIR = Variable("NEURONX_CACHE_DIR", "", "Their directory; by default transformers_neuronx in XDG_CACHE_HOME.")
CACHE_HOME = Variable("XDG_CACHE_HOME", "~/.cache", "The user's cache directory.")
DUMP_TO = Variable("NEURONX_DUMP_TO", "", "A directory for the HLO of every program, before and after XLA, and a log.")
XLA_FLAGS = Variable("XLA_FLAGS", "", "XLA's own options. Read only to tell executables apart.")
API_KEYS = Variable("NEURONX_API_KEY", "", "Keys that `serve` accepts if --api-key gives none, with spaces between.")
CLIENT_KEY = Variable("OPENAI_API_KEY", "", "The key that `bench --url` sends if there is no --api-key.")
CC_FLAGS = Variable("NEURON_CC_FLAGS", "", "Options for neuronx-cc. They add to this package's own, or replace them.")
PLATFORM_TARGET = Variable(
    "NEURON_PLATFORM_TARGET_OVERRIDE", "", "The type of instance to compile for if NEURON_CC_FLAGS has no --target."
)
COMPILE_TIMEOUT = Variable("NEURONX_COMPILE_TIMEOUT", "14400", "Seconds for one run of neuronx-cc; 0 is no limit.")
PYTHONPATH = Variable("PYTHONPATH", "", "Where Python finds modules. Compiler processes also get this package's path.")
LOG_LEVEL = Variable("TF_CPP_MIN_LOG_LEVEL", "1", "XLA's own log: 0 everything, 1 warnings, 2 errors. Set, not read.")
VISIBLE_CORES = Variable("NEURON_RT_VISIBLE_CORES", "", "NeuronCores that this process may use: 0-3,6. Read only.")
NUM_CORES = Variable("NEURON_RT_NUM_CORES", "", "Number of NeuronCores that this process may use. Read only.")
WORLD = Variable(
    "NEURONX_WORLD",
    "",
    "The processes that share a model, as RANK/SIZE@HOST:PORT: each with its own rank, and where rank 0 runs; or off. "
    "By default it is what the launcher says: torchrun, SLURM, Open MPI, or the variables of the original.",
)
RANK = Variable("RANK", "", "The number of this process. torchrun sets it.")
WORLD_SIZE = Variable("WORLD_SIZE", "", "How many processes there are. torchrun sets it.")
MASTER_ADDR = Variable("MASTER_ADDR", "", "The host of rank 0. torchrun sets it.")
MASTER_PORT = Variable("MASTER_PORT", "", "torchrun's own port there. The next one must be free.")
SLURM_JOB_ID = Variable("SLURM_JOB_ID", "", "The number of the job, which selects a port. SLURM sets it.")
SLURM_PROCID = Variable("SLURM_PROCID", "", "The number of this process. SLURM sets it.")
SLURM_STEP_NUM_TASKS = Variable("SLURM_STEP_NUM_TASKS", "", "How many processes there are. SLURM sets it.")
SLURM_STEP_NODELIST = Variable("SLURM_STEP_NODELIST", "", "Their hosts. SLURM sets it.")
OMPI_RANK = Variable("OMPI_COMM_WORLD_RANK", "", "The number of this process. Open MPI sets it.")
OMPI_SIZE = Variable("OMPI_COMM_WORLD_SIZE", "", "How many processes there are. Open MPI sets it.")
OMPI_LAUNCHER = Variable("OMPI_MCA_orte_hnp_uri", "", "Where mpirun runs. Open MPI 4 sets it.")
RANK_ID = Variable("NEURON_RANK_ID", "", "The number of this process, as the original has it.")
LOCAL_TP = Variable("NEURON_LOCAL_TP", "", "Devices of each process, as the original has it.")
ROOT_COMM_ID = Variable("NEURON_RT_ROOT_COMM_ID", "", "HOST:PORT of rank 0, as the original has it.")


def for_child(*places: str) -> dict[str, str]:
    """Return the environment of a child process, whose Python finds modules where ours does, and in `places`.

    The child may run in another directory.
    """
    found = [os.path.abspath(place) for place in PYTHONPATH.get().split(os.pathsep) if place]
    return os.environ | {PYTHONPATH.name: os.pathsep.join([*found, *places])}
