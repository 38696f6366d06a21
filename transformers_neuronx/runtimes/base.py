"""What a runtime is: three verbs. It does not know what the programs compute.

`compile` makes an executable of a module, `put` brings arrays to the devices, and an executable turns device tensors
into device tensors. A tensor-parallel program runs on several devices at once; each of its tensors is one shard on
every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from transformers_neuronx.pyhlo import HloModuleProto


class MemoryStats(NamedTuple):
    """Bytes of a compiled program on one device."""

    arguments: int
    outputs: int
    aliased: int
    temporaries: int


class DeviceTensor(Protocol):
    """An array on the devices. Donated ones are gone once the program that takes them has been called."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def numpy(self) -> np.ndarray[Any, Any]:
        """The first device's shard, on the host. Waits for it; raises what went wrong in computing it."""
        ...


class Executable(Protocol):
    def __call__(self, *tensors: DeviceTensor) -> list[DeviceTensor]:
        """Run on all devices; the arguments are in the order of the module's parameters. Does not wait."""
        ...

    def memory(self) -> MemoryStats: ...

    def text(self) -> str:
        """The compiled program, for people."""
        ...


class Runtime(Protocol):
    @property
    def description(self) -> str:
        """For people: engine, version, device."""
        ...

    @property
    def device_count(self) -> int: ...

    def compile(self, module: HloModuleProto) -> Executable:
        """An executable for all devices. Raises EngineError with the compiler's words when it refuses."""
        ...

    def put(self, shards: Sequence[np.ndarray[Any, Any]], given: bool = False) -> DeviceTensor:
        """Bring one array per device to the devices; a single one goes to all of them.

        Arrays that are `given` are not written to any more: where they can be used as they lie, they are not copied.
        """
        ...

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """An array on the host, of whatever numbers, that can be used as it lies once it is given."""
        ...
