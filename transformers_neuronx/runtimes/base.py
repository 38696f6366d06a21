"""The interface of a runtime: a compiler, devices, and their properties. It does not know what programs compute.

`compile` makes an executable from a module. `put` brings arrays to the devices. An executable takes device tensors and
returns device tensors. A tensor-parallel program runs on several devices at once, and each of its tensors has one shard
on every device. An executable can be serialized to bytes, and `load` restores it where the `fingerprint` is the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from transformers_neuronx.errors import ConfigError, EngineError
from transformers_neuronx.pyhlo import HloModuleProto


class MemoryStats(NamedTuple):
    """Memory that a compiled program uses on one device, in bytes."""

    arguments: int
    outputs: int
    aliased: int
    temporaries: int


class DeviceTensor(Protocol):
    """An array on the devices. A donated one is gone once the program that takes it has been called."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one device's shard."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes on all devices of this process together."""
        ...

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return the shard of this process's first device on the host. Waits for it, and raises any error of its
        computation.
        """
        ...

    def shards(self) -> list[np.ndarray[Any, Any]]:
        """Return the shard of every device of this process on the host."""
        ...


class Executable(Protocol):
    """A compiled program on its devices."""

    def __call__(self, *tensors: DeviceTensor) -> list[DeviceTensor]:
        """Run on all devices, without waiting. Arguments are in the order of the module's parameters."""
        ...

    def memory(self) -> MemoryStats:
        """Return the memory that it uses on one device, as the compiler reports it."""
        ...

    def text(self) -> str:
        """Return the compiled program as text for people."""
        ...

    def files(self) -> Mapping[str, bytes]:
        """Return other files for people to inspect, by file name ending."""
        ...

    def serialize(self) -> bytes:
        """Return the bytes from which `Runtime.load` restores it: machine code, to be trusted like a program."""
        ...


class Runtime(Protocol):
    """Devices of one kind, and their compiler."""

    @property
    def description(self) -> str:
        """Engine, version and device, as text for people."""
        ...

    @property
    def device_count(self) -> int:
        """Number of devices, of all processes, that run a program together: the tensor-parallel degree."""
        ...

    @property
    def here(self) -> range:
        """The numbers of the devices that this process has."""
        ...

    @property
    def lost(self) -> str:
        """Why the devices are gone, or empty. They come back when something is brought to them."""
        ...

    def compile(self, module: HloModuleProto) -> Executable:
        """Return an executable for all devices. Raises EngineError with the compiler's message."""
        ...

    def stop(self) -> None:
        """End running compilations, where that is possible, as Ctrl-C would."""
        ...

    @property
    def suffix(self) -> str:
        """Ending of the name of a file with an executable."""
        ...

    @property
    def patience(self) -> float:
        """Seconds after which another process that compiles a program is assumed to be stuck."""
        ...

    @property
    def fingerprint(self) -> Mapping[str, str]:
        """Everything that an executable depends on except its module: engine, version, options, devices, processor."""
        ...

    @property
    def loads_lazily(self) -> bool:
        """Whether a serialized executable may be loaded when it is first used: soon enough, and it does not fail."""
        ...

    def load(self, data: bytes, module: HloModuleProto) -> Executable:
        """Restore the serialized executable of `module` without compiling. Raises EngineError if that fails.

        The bytes must be undamaged, and come from a runtime with the same fingerprint. Neither is checked here.
        """
        ...

    @property
    def panels(self) -> bool:
        """Whether products are fastest with matrices in panels, the layout of `transformers_neuronx.weights.panels`."""
        ...

    def attends_in_place(self, cached: str, head_dim: int) -> bool:
        """Whether attention reads a cache of this type in place, and only the positions in use."""
        ...

    @property
    def scatters(self) -> bool:
        """Whether it is fastest to write all rows to a cache at once, rather than one after the other."""
        ...

    @property
    def pages(self) -> bool:
        """Whether attention over a cache in pages can be compiled."""
        ...

    @property
    def loops(self) -> bool:
        """Whether a program may have a loop whose end only the devices know."""
        ...

    def spent(self) -> Mapping[str, tuple[int, float]]:
        """Return calls and seconds so far of the composites for which the runtime has its own code."""
        ...

    def module_text(self, module: HloModuleProto) -> str:
        """Return the module as text for people, as the engine prints it."""
        ...

    def put(self, shards: Sequence[np.ndarray[Any, Any]], donate: bool = False) -> DeviceTensor:
        """Bring one array per device of this process to the devices. A single array goes to all of them.

        With `donate`, the caller never writes to the arrays again, so the runtime may use them without a copy.
        """
        ...

    def let_go(self) -> None:
        """Free donated arrays that no tensor uses any more. An engine may otherwise keep them until its next call."""
        ...

    def usable(self, array: np.ndarray[Any, Any]) -> bool:
        """Whether a donated array can be used in place, without a copy."""
        ...

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """Return a `usable` array with undefined contents."""
        ...


def raw(array: np.ndarray[Any, Any]) -> memoryview:
    """Return the bytes of an array, without a copy if they are contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def want_devices(runtime: Runtime) -> None:
    """Raise EngineError if the devices are lost."""
    if runtime.lost:
        raise EngineError(runtime.lost)


def want_all_here(runtime: Runtime, what: str) -> None:
    """Raise ConfigError if other processes have some of the devices."""
    if len(runtime.here) < (count := runtime.device_count):
        raise ConfigError(f"{what} needs all {count} devices of a model in one process, which has {len(runtime.here)}")
