"""Processes that run models together: how many there are, which one this is, and where they meet.

Launchers set this in environment variables: torchrun, SLURM, Open MPI, or those of the original library.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from transformers_neuronx import env
from transformers_neuronx.errors import ConfigError

OFF = "off"  # NEURONX_WORLD of processes that have a launcher, but each a model of its own
SLURM_PORTS = range(61440, 65536)  # a job has the port that its number selects


class World(NamedTuple):
    """`size` processes, and the number of this one, `rank`. They meet at a port of the host of rank 0."""

    rank: int
    size: int
    host: str
    port: int

    def devices(self, degree: int) -> int:
        """Return the number of devices of each process, for programs over `degree` devices.

        Raises ConfigError if they cannot be equally many.
        """
        if degree % self.size:
            raise ConfigError(
                f"tp_degree must be a multiple of the {self.size} processes that run the model, got {degree}; set "
                f"{env.WORLD.name}={OFF} if each of them has a model of its own"
            )
        return degree // self.size


def world(degree: int) -> World | None:
    """Return the processes that share programs over `degree` devices; None if this one has all devices itself.

    Raises ConfigError for variables that make no sense.
    """
    if degree == 1 or env.WORLD.get() == OFF:
        return None
    found = _own() or _torchrun() or _slurm() or _open_mpi() or _original(degree)
    if found is None or found.size == 1:
        return None
    if not 0 <= found.rank < found.size:
        raise ConfigError(f"of {found.size} processes the rank must be from 0 to {found.size - 1}, got {found.rank}")
    return found


def _own() -> World | None:
    if not (text := env.WORLD.get()):
        return None
    if not (match := re.fullmatch(r"(\d+)/([1-9]\d*)@(.+):(\d+)", text)):
        raise ConfigError(f"{env.WORLD.name} must be RANK/SIZE@HOST:PORT, or {OFF}, got {text!r}")
    rank, size, host, port = match.groups()
    return World(int(rank), int(size), host, int(port))


def _torchrun() -> World | None:
    if not _given(env.RANK, env.WORLD_SIZE, env.MASTER_ADDR, env.MASTER_PORT):
        return None
    # torchrun listens at its port itself.
    return World(_number(env.RANK), _number(env.WORLD_SIZE), env.MASTER_ADDR.get(), _number(env.MASTER_PORT) + 1)


def _slurm() -> World | None:
    if not _given(env.SLURM_JOB_ID, env.SLURM_STEP_NUM_TASKS, env.SLURM_PROCID, env.SLURM_STEP_NODELIST):
        return None
    port = SLURM_PORTS[_number(env.SLURM_JOB_ID) % len(SLURM_PORTS)]
    return World(_number(env.SLURM_PROCID), _number(env.SLURM_STEP_NUM_TASKS), _first(env.SLURM_STEP_NODELIST), port)


def _first(nodes: env.Variable) -> str:
    """Return the first host of a list of SLURM's: gpu01,gpu02 or gpu[01-04,7]-b or a mixture."""
    match = re.match(r"([^,\[]+)(?:\[([^-,\]]+)[^\]]*\]([^,]*))?", nodes.get())
    if match is None:
        raise ConfigError(f"{nodes.name} must name hosts, got {nodes.get()!r}")
    before, number, after = (part or "" for part in match.groups())
    return before + number + after


def _open_mpi() -> World | None:
    if not _given(env.OMPI_SIZE, env.OMPI_RANK, env.OMPI_LAUNCHER):
        return None
    # 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911 is where mpirun runs. Jobs have other numbers, so other ports.
    match = re.match(r"(\d+)\.\d+;tcp://([^:,]+)", env.OMPI_LAUNCHER.get())
    if match is None:
        raise ConfigError(
            f"{env.OMPI_LAUNCHER.name} names no host where the processes could meet: set "
            f"{env.WORLD.name}=RANK/SIZE@HOST:PORT for each; got {env.OMPI_LAUNCHER.get()!r}"
        )
    port = SLURM_PORTS[int(match[1]) // 2**12 % len(SLURM_PORTS)]
    return World(_number(env.OMPI_RANK), _number(env.OMPI_SIZE), match[2], port)


def _original(degree: int) -> World | None:
    if not _given(env.RANK_ID, env.LOCAL_TP, env.ROOT_COMM_ID):
        return None
    each = _number(env.LOCAL_TP)
    if each < 1 or degree % each:
        raise ConfigError(f"tp_degree={degree} must be a multiple of {env.LOCAL_TP.name}={each}")
    host, _, port = env.ROOT_COMM_ID.get().rpartition(":")
    if not (host and port.isdecimal()):
        raise ConfigError(f"{env.ROOT_COMM_ID.name} must be HOST:PORT, got {env.ROOT_COMM_ID.get()!r}")
    return World(_number(env.RANK_ID), degree // each, host, int(port))


def _given(*variables: env.Variable) -> bool:
    return all(variable.given for variable in variables)


def _number(variable: env.Variable) -> int:
    text = variable.get()
    if not text.isdecimal():
        raise ConfigError(f"{variable.name} must be a whole number, got {text!r}")
    return int(text)
