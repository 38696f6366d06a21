"""Arrays of jaxlib: what programs take and return."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from transformers_neuronx.errors import EngineError
from transformers_neuronx.pyhlo.dtypes import from_numpy
from transformers_neuronx.runtimes.for_gpus import full
from transformers_neuronx.runtimes.signature import Aval
from transformers_neuronx.runtimes.xla_clients import import_jax, jaxlib, jaxlib_hlo

COPIED = 2**20  # bytes, at most, of arrays of XLA:CPU that are copied to be read


@contextmanager
def engine_errors(what: str) -> Iterator[None]:
    """Turn jaxlib's errors into EngineError."""
    try:
        yield
    except jaxlib().JaxRuntimeError as error:
        raise EngineError(f"{what} failed on the device: {error}{full(error)}") from error


@functools.cache
def _on_device(device: Any) -> Any:
    """Return the sharding "all on `device`". jaxlib 0.10 uses two attributes that only JAX's own subclass has."""

    class OnDevice(jaxlib().SingleDeviceSharding):  # type: ignore[misc]
        memory_kind = None

        def _to_xla_hlo_sharding(self, rank: int) -> Any:
            return jaxlib_hlo().HloSharding.replicate()

    return OnDevice(device)


@functools.cache
def on_each(devices: Any) -> Any:
    """Return the sharding "another array on each of these devices"."""
    return _on_device(devices[0]) if len(devices) == 1 else jaxlib().GSPMDSharding(devices, jaxlib_hlo().OpSharding())


def as_result(aval: Aval, where: Any) -> Any:
    """Return what makes a result of a program an array."""
    make = jaxlib().array_result_handler
    try:
        return make(aval, where, True, _skip_checks=True)
    except TypeError:  # newer versions have no checks to skip, which need JAX
        return make(aval, where, True)


class XlaTensor:
    """An array on each device of this process, all of one shape: for programs, one `argument`."""

    def __init__(self, argument: Any, devices: Any, aval: Aval) -> None:
        self.argument = argument
        self.devices = devices  # those of all processes
        self.aval = aval
        self.donated = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.aval.shape

    @property
    def nbytes(self) -> int:
        return self.aval.nbytes * len(self.devices.addressable_device_list)

    @property
    def arrays(self) -> list[Any]:
        """The array on each device."""
        if len(self.devices) == 1:
            return [self.argument]
        import_jax()
        return self.argument._arrays or [self.argument]  # None if they are gone, which who reads them is told

    def numpy(self) -> np.ndarray[Any, Any]:
        return _on_host(self.arrays[0], self.aval)

    def shards(self) -> list[np.ndarray[Any, Any]]:
        return [_on_host(array, self.aval) for array in self.arrays]


def _on_host(array: Any, aval: Aval) -> np.ndarray[Any, Any]:
    """Return an array that nobody can write to. A small one is copied here, as jaxlib would have to import JAX."""
    with engine_errors("the program"):
        array.block_until_ready()
        if aval.nbytes <= COPIED and array.platform() == "cpu" and from_numpy(aval.dtype).bits >= 8:
            data = ctypes.string_at(array.unsafe_buffer_pointer(), aval.nbytes)
            return np.frombuffer(data, aval.dtype).reshape(aval.shape)
        import_jax()
        return np.asarray(array._single_device_array_to_np_array_did_copy()[0])


def put(array: np.ndarray[Any, Any], aval: Aval, device: Any, donate: bool) -> Any:
    """Bring an array to a device. With `donate`, XLA:CPU uses its memory, which nobody may write to again."""
    private = jaxlib()
    # Otherwise the caller may write to its array again. With zero copy, a program would see that.
    how = private.HostBufferSemantics.ZERO_COPY if donate else private.HostBufferSemantics.IMMUTABLE_ONLY_DURING_CALL
    return private.batched_device_put(
        aval,
        _on_device(device),
        [np.ascontiguousarray(array).reshape(aval.shape)],
        [device],
        committed=True,
        host_buffer_semantics=how,
        enable_x64=True,
    )
