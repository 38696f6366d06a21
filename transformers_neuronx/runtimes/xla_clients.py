"""jaxlib: its version, and clients of its devices, which may be those of several processes.

The clients are our own: they work whether or not JAX is imported or configured, and do not affect JAX.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import importlib.util
import os
import socket
import stat
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from transformers_neuronx import env
from transformers_neuronx.errors import ConfigError, EngineError
from transformers_neuronx.runtimes import kernels
from transformers_neuronx.runtimes.meeting import PATIENCE, SILENCE, Meeting
from transformers_neuronx.runtimes.processor import processor
from transformers_neuronx.runtimes.world import World, world
from transformers_neuronx.support import entropy
from transformers_neuronx.support.interrupts import held_back
from transformers_neuronx.version import __version__

_BUFFER = socket.SOL_SOCKET, socket.SO_SNDBUF
_TINY, _LARGE = 8192, 2**22  # bytes

# The versions that this file was tested with, from OLDEST up to but not including NEWEST.
OLDEST, NEWEST = (0, 10, 2), (0, 13)


def check_version(version: str) -> None:
    """Raise EngineError for a jaxlib version whose private interface was never tested."""
    numbers = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    if not OLDEST <= numbers < NEWEST:
        oldest, newest = (".".join(map(str, v)) for v in (OLDEST, NEWEST))
        raise EngineError(
            f"jaxlib must be at least {oldest} and below {newest}, got {version}: "
            f'pip install "jaxlib>={oldest},<{newest}"'
        )


@functools.cache
def jaxlib() -> Any:
    """Return jaxlib's extension module."""
    try:
        version = metadata.version("jaxlib")
    except metadata.PackageNotFoundError:
        raise EngineError("the cpu and cuda runtimes need jaxlib, which is not installed: pip install jaxlib") from None
    check_version(version)
    env.LOG_LEVEL.set_default()
    with held_back():
        return importlib.import_module("jaxlib._jax")


@functools.cache
def import_jax() -> None:
    """Import JAX, if it is there, before jaxlib does so inside of a call, where it swallows Ctrl-C."""
    with suppress(Exception):
        importlib.import_module("jax")


@functools.cache
def jaxlib_hlo() -> Any:
    jaxlib()
    with held_back():
        return importlib.import_module("jaxlib._hlo")


class Devices(NamedTuple):
    """The devices of programs, in the order of their ranks, a client of them, and which of them this process has.

    `meeting` is with the other processes, if there are some.
    """

    client: Any
    all: tuple[Any, ...]
    here: range
    meeting: Meeting | None = None


def devices(platform: str, degree: int) -> Devices:
    """Return `degree` devices of "cpu" or "cuda", which may be those of several processes.

    Raises EngineError if there are fewer, and ConfigError if the processes cannot have equally many.
    """
    if processes := world(degree):
        return _joined(processes).devices(platform, processes.devices(degree))
    client = _cpu_client(degree) if platform == "cpu" else _cuda_client()
    if (found := client.device_count()) < degree:
        raise EngineError(f"tp_degree={degree} needs that many devices, but {platform} has {found}: lower tp_degree")
    return Devices(client, tuple(client.devices()[:degree]), range(degree))


@functools.cache
def _cpu_client(devices: int) -> Any:
    _register_kernels()
    return jaxlib().get_tfrt_cpu_client(asynchronous=True, num_devices=devices)


@functools.cache
def _joined(processes: World) -> _Joined:
    return _Joined(processes)


class _Joined:
    """What this process has of a world. It joins the others once, until it ends."""

    def __init__(self, processes: World) -> None:
        self._world, self._service = processes, None
        facts = dict(version=__version__, jaxlib=metadata.version("jaxlib"), processes=processes.size)
        facts |= dict(kernels=kernels.fingerprint(), instructions=processor()["instructions"])
        self._meeting = meeting = Meeting(processes, facts, self._coordinate)
        atexit.register(self._leave)
        entropy.share(meeting.told["entropy"])
        # jaxlib ends processes that miss each other without a word. The meeting is faster, and says why.
        slower = round(6 * SILENCE)
        self._distributed = jaxlib().get_distributed_runtime_client(
            f"{processes.host}:{meeting.told['port']}", processes.rank, init_timeout=round(PATIENCE),
            heartbeat_timeout=slower, shutdown_timeout=round(SILENCE), use_compression=True,
            shutdown_on_destruction=False,
        )  # fmt: skip
        self._distributed.connect()
        self._clients: dict[str, tuple[Any, int]] = {}

    def _coordinate(self, address: str) -> dict[str, Any]:
        """Start jaxlib's own meeting point in rank 0, and return what others need for it."""
        place = "127.0.0.1" if address.startswith("127.") else "[::]"
        with socket.create_server(("", 0)) as free:
            port = free.getsockname()[1]
        self._service = jaxlib().get_distributed_runtime_service(
            f"{place}:{port}", self._world.size, heartbeat_timeout=round(6 * SILENCE),
            cluster_register_timeout=round(PATIENCE), shutdown_timeout=round(SILENCE), recoverable=False,
        )  # fmt: skip
        return dict(port=port, entropy=entropy.new())

    def devices(self, platform: str, each: int) -> Devices:
        """Return `each` devices of every process."""
        if platform not in self._clients:
            self._clients[platform] = (self._cpu(each) if platform == "cpu" else self._cuda()), each
        client, most = self._clients[platform]
        if each > most:
            raise ConfigError(
                f"this process has joined the others with {most} devices, and a model needs {each}: make the model "
                "with the largest tp_degree first"
            )
        ranks = range(self._world.size)
        found = sorted(client.devices(), key=lambda device: (device.process_index, device.id))
        of_rank = [[device for device in found if device.process_index == rank][:each] for rank in ranks]
        if any(len(own) < each for own in of_rank):
            raise EngineError(f"tp_degree={each * len(ranks)} needs {each} devices in each process, got {len(found)}")
        here = range(self._world.rank * each, (self._world.rank + 1) * each)
        return Devices(client, tuple(device for own in of_rank for device in own), here, self._meeting)

    def _cpu(self, each: int) -> Any:
        _register_kernels()
        collectives = jaxlib().make_gloo_tcp_collectives(self._distributed, hostname=self._meeting.address)
        return jaxlib().get_tfrt_cpu_client(
            asynchronous=True, distributed_client=self._distributed, node_id=self._world.rank,
            num_nodes=self._world.size, collectives=collectives, num_devices=each,
        )  # fmt: skip

    def _cuda(self) -> Any:
        """Written as JAX does it. It has run on no device."""
        return _cuda_client(self._distributed, node_id=self._world.rank, num_nodes=self._world.size)

    def _leave(self) -> None:
        """Wait for the others before the first process ends, since jaxlib would end them with it."""
        self._meeting.leave()
        with suppress(Exception):
            self._distributed.shutdown()
            if self._service is not None:
                self._service.shutdown()


def enlarge_buffers() -> None:
    """Give Gloo's connections larger buffers to send from.

    It makes them 2304 bytes, which the system doubles. A large message then waits for acknowledgements, which may come
    40 ms late: an all-reduce of a megabyte takes 20 times as long.
    """
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                _enlarge(connection)


def _enlarge(connection: socket.socket) -> None:
    if connection.type == socket.SOCK_STREAM and connection.getsockopt(*_BUFFER) <= _TINY:
        connection.setsockopt(*_BUFFER, _LARGE)


@functools.cache
def _register_kernels() -> None:
    for target, handler in kernels.handlers().items():
        jaxlib().register_custom_call_target(target, handler, "Host", 1)


@functools.cache
def _cuda_client(distributed: Any = None, **options: Any) -> Any:
    jaxlib()
    from jaxlib import xla_client

    if not xla_client.pjrt_plugin_loaded("cuda"):
        xla_client.load_pjrt_plugin_dynamically("cuda", str(_cuda_plugin()))
    if not xla_client.pjrt_plugin_initialized("cuda"):
        xla_client.initialize_pjrt_plugin("cuda")
    options = {**xla_client.generate_pjrt_gpu_plugin_options(), **options}
    return xla_client.make_c_api_client("cuda", options, distributed)


def _cuda_plugin() -> Path:
    for package in ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12"):
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            continue
        for folder in spec.submodule_search_locations or [] if spec else []:
            if (library := Path(folder) / "xla_cuda_plugin.so").exists():
                return library
    raise EngineError('the cuda runtime needs jaxlib\'s plugin: pip install "transformers-neuronx[cuda]"')
