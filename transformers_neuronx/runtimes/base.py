"""What a runtime is: a compiler, devices, and what they say of themselves. It does not know what programs compute.

`compile` makes an executable of a module, `put` brings arrays to the devices, and an executable turns device tensors
into device tensors. A tensor-parallel program runs on several devices at once; each of its tensors is one shard on
every device. An executable can be had as bytes, of which `load` makes it again wherever the `fingerprint` is the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    def shape(self) -> tuple[int, ...]:
        """Of one device's shard."""
        ...

    @property
    def nbytes(self) -> int:
        """On all devices together."""
        ...

    def numpy(self) -> np.ndarray[Any, Any]:
        """The first device's shard, on the host. Waits for it; raises what went wrong in computing it."""
        ...

    def shards(self) -> list[np.ndarray[Any, Any]]:
        """Every device's shard, on the host."""
        ...


class Executable(Protocol):
    """A compiled program on its devices."""

    def __call__(self, *tensors: DeviceTensor) -> list[DeviceTensor]:
        """Run on all devices; the arguments are in the order of the module's parameters. Does not wait."""
        ...

    def memory(self) -> MemoryStats:
        """Bytes that it takes on one device, as the compiler says."""
        ...

    def text(self) -> str:
        """The compiled program, for people."""
        ...

    def files(self) -> Mapping[str, bytes]:
        """What else there is to be looked at, by the endings of files."""
        ...

    def serialize(self) -> bytes:
        """What `Runtime.load` makes the same executable of: machine code, to be trusted like a program."""
        ...


class Runtime(Protocol):
    """Devices of one kind, and the compiler for them."""

    @property
    def description(self) -> str:
        """For people: engine, version, device."""
        ...

    @property
    def device_count(self) -> int:
        """How many devices run a program together: the tensor-parallel degree."""
        ...

    def compile(self, module: HloModuleProto) -> Executable:
        """An executable for all devices. Raises EngineError with the compiler's words when it refuses."""
        ...

    def stop(self) -> None:
        """End the compilations that are under way, where they can be ended: to them it is as if Ctrl-C were pressed."""
        ...

    @property
    def suffix(self) -> str:
        """What the name of a file with an executable ends in."""
        ...

    @property
    def patience(self) -> float:
        """Seconds after which whoever compiles a program is taken to be stuck."""
        ...

    @property
    def fingerprint(self) -> Mapping[str, str]:
        """All that an executable depends on, but its module: engine, version, options, devices, the processor."""
        ...

    def load(self, data: bytes, module: HloModuleProto) -> Executable:
        """The executable of `module` that was serialized, without compiling. Raises EngineError when it cannot.

        The bytes have to be those of a runtime with the same fingerprint, unharmed: neither is checked here.
        """
        ...

    @property
    def panels(self) -> bool:
        """Whether products are fastest with matrices that lie in panels, as `transformers_neuronx.panels` has them."""
        ...

    def attends_in_place(self, cached: str, head_dim: int) -> bool:
        """Whether attention reads a cache of this type where it lies, and of it only the positions in use."""
        ...

    @property
    def loops(self) -> bool:
        """Whether a program may have a loop of which only the devices know when it ends."""
        ...

    def spent(self) -> Mapping[str, tuple[int, float]]:
        """Calls of composites that the runtime has code of its own for, so far, and the seconds that they took."""
        ...

    def module_text(self, module: HloModuleProto) -> str:
        """The module as the engine prints it, for people."""
        ...

    def put(self, shards: Sequence[np.ndarray[Any, Any]], donate: bool = False) -> DeviceTensor:
        """Bring one array per device to the devices; a single one goes to all of them.

        With `donate`, the caller never writes to the arrays again: the runtime may use them in place, without a copy.
        """
        ...

    def let_go(self) -> None:
        """Free donated arrays that no tensor uses any more: an engine may keep them until its next call."""
        ...

    def usable(self, array: np.ndarray[Any, Any]) -> bool:
        """Whether a donated array can be used in place, without a copy."""
        ...

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """A `usable` array, of whatever numbers."""
        ...
