"""XLA's runtimes, over the clients of `xla_clients` and the arrays of `xla_arrays`: `cpu` and `cuda`.

These files have all private parts of jaxlib that the project uses, behind a check of its version and self-tests.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from typing import Any

import numpy as np

from transformers_neuronx import env, hlo
from transformers_neuronx.compiler import compile_py_func
from transformers_neuronx.config import check_degree
from transformers_neuronx.errors import EngineError
from transformers_neuronx.pyhlo import HloModuleProto, HloScribe, Tensor, dtype_named
from transformers_neuronx.pyhlo.dtypes import from_numpy
from transformers_neuronx.runtimes import kernels
from transformers_neuronx.runtimes.base import DeviceTensor, Executable, MemoryStats, raw
from transformers_neuronx.runtimes.collectives import in_order
from transformers_neuronx.runtimes.for_gpus import for_gpus, full
from transformers_neuronx.runtimes.meeting import Meeting
from transformers_neuronx.runtimes.processor import processor
from transformers_neuronx.runtimes.signature import Signature, aval_of
from transformers_neuronx.runtimes.xla_arrays import XlaTensor, as_result, engine_errors, on_each, put
from transformers_neuronx.runtimes.xla_clients import Devices, devices, enlarge_buffers, jaxlib, jaxlib_hlo

ALIGNMENT = 64  # bytes, of arrays that XLA:CPU uses in place

# jaxlib 0.10.2 and later fuse a dot with the reduction after it. Some shapes then give wrong results without an error
# (jax#39103), others crash (jax#39257, jax#40412). The first option drops that fusion and keeps the fast product.
# jaxlib also drops optimization barriers before it schedules. Then all quantized weights are widened at the start, and
# a program needs the memory of an unquantized model. The second option keeps the barriers.
CPU_OPTIONS = [
    ("xla_cpu_experimental_ynn_fusion_type", "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"),
    ("xla_disable_hlo_passes", "cse_barrier_expander"),
]


def module_text(module: HloModuleProto) -> str:
    """Return a module's HLO as XLA prints it."""
    return str(jaxlib_hlo().XlaComputation(module.SerializeToString()).as_hlo_text())


class XlaExecutable:
    """A loaded program."""

    def __init__(
        self, loaded: Any, devices: Any, module: HloModuleProto, data: bytes | None, meeting: Meeting | None
    ) -> None:
        self.loaded = loaded
        self.meeting = meeting
        self.calls = 0  # with other processes
        self.data = data
        self.signature = Signature(module)
        self.devices = devices
        self._as_results = [as_result(aval, on_each(devices)) for aval in self.signature.results]
        # The weights of the last call, checked, and as arguments: hundreds at each call would take as long as the rest.
        self._held: tuple[tuple[Any, ...], list[Any]] = (), []

    def __call__(self, *tensors: Any) -> list[DeviceTensor]:
        place = self.signature.weights
        weights, as_arguments = self._held
        known = tensors[place] == weights
        self.signature.take(tensors, known)
        if not known:
            as_arguments = [tensor.argument for tensor in tensors[place]]
            self._held = tensors[place], as_arguments
        if self.meeting:
            self.meeting.note(self.signature.name.encode())
            self.calls += 1
            if self.calls == 2:  # the first one has opened connections
                enlarge_buffers()
        with engine_errors(self.signature.name):
            before, after = ([x.argument for x in part] for part in (tensors[: place.start], tensors[place.stop :]))
            arguments = [*before, *as_arguments, *after]
            results = self.loaded.execute_sharded(arguments).consume_with_handlers(self._as_results)
        return [
            XlaTensor(array, self.devices, aval) for array, aval in zip(results, self.signature.results, strict=True)
        ]

    def memory(self) -> MemoryStats:
        stats = self.loaded.get_compiled_memory_stats()
        kinds = "argument", "output", "alias", "temp"
        return MemoryStats(*(getattr(stats, f"{kind}_size_in_bytes") for kind in kinds))

    def text(self) -> str:
        return "\n".join(module.to_string() for module in self.loaded.hlo_modules())

    def files(self) -> Mapping[str, bytes]:
        return {}

    def serialize(self) -> bytes:
        if self.data is None:
            raise EngineError(f"{self.signature.name} cannot be serialized by this engine")
        return self.data


class XlaRuntime:
    """A PJRT client, and the devices that a program runs on, which may be those of several processes."""

    suffix, patience = "executable", 600.0
    loops, loads_lazily, lost = True, True, ""

    def __init__(self, platform: str, found: Devices) -> None:
        self.platform = platform
        self.device_count = len(found.all)
        self.here = found.here
        self._client, self._all, self._meeting = found.client, found.all, found.meeting
        self._own = found.all[found.here.start : found.here.stop]
        self._devices = jaxlib().DeviceList(found.all)

    @property
    def description(self) -> str:
        kind = self._own[0].device_kind
        count = "one device" if self.device_count == 1 else f"{self.device_count} devices"
        count += f" of {self._meeting.world.size} processes" if self._meeting else ""
        return f"XLA:{self.platform.upper()} (jaxlib {metadata.version('jaxlib')}), {count}, {kind}"

    @functools.cached_property
    def fingerprint(self) -> Mapping[str, str]:
        facts = dict(
            platform=self.platform,
            jaxlib=metadata.version("jaxlib"),
            engine=str(self._client.platform_version),
            devices=f"{self.device_count} {self._own[0].device_kind}",
            options=str(CPU_OPTIONS if self.platform == "cpu" else []),
            XLA_FLAGS=env.XLA_FLAGS.get(),
        )
        if self._meeting:  # executables have the numbers of their devices
            facts |= dict(device_ids=" ".join(str(device.id) for device in self._all), sums="in order")
        return facts | processor() | dict(kernels=kernels.fingerprint()) if self.platform == "cpu" else facts

    def compile(self, module: HloModuleProto) -> Executable:
        private = jaxlib()
        try:
            given = kernels.with_kernels(module) if self.platform == "cpu" else for_gpus(module)
            given = _with_one_result(in_order(given) if self._meeting else given)
            stablehlo = private.mlir.hlo_to_stablehlo(given.SerializeToString())
            loaded = self._client.compile_and_load(stablehlo, self._devices, self._options())
        except private.JaxRuntimeError as error:
            refused = f"XLA:{self.platform.upper()} refused the module {module.name!r}"
            raise EngineError(f"{refused}: {error}{full(error)}") from error
        return XlaExecutable(loaded, self._devices, module, self._as_bytes(loaded), self._meeting)

    def stop(self) -> None:
        pass  # XLA finishes every compilation that it starts

    def _as_bytes(self, loaded: Any) -> bytes | None:
        # Before the first run: jaxlib 0.10.2 cannot serialize a program with a sort that has run, and leaves out the
        # code of one that it has loaded itself.
        try:
            return bytes(self._client.serialize_executable(loaded))
        except jaxlib().JaxRuntimeError:
            return None

    def load(self, data: bytes, module: HloModuleProto) -> Executable:
        with engine_errors(f"loading {module.name}"):
            loaded = self._client.deserialize_executable(data, self._devices, self._options())
        return XlaExecutable(loaded, self._devices, module, data, self._meeting)

    @property
    def panels(self) -> bool:
        return self.platform == "cpu" and kernels.level() != "off"

    def attends_in_place(self, cached: str, head_dim: int) -> bool:
        return self.platform == "cpu" and kernels.attends_in_place(cached, head_dim)

    @property
    def scatters(self) -> bool:
        return self.platform == "cuda"

    @property
    def pages(self) -> bool:
        return True

    def spent(self) -> Mapping[str, tuple[int, float]]:
        return kernels.spent() if self.platform == "cpu" else {}

    def module_text(self, module: HloModuleProto) -> str:
        return module_text(module)

    def _options(self) -> Any:
        private = jaxlib()
        options = private.CompileOptions()
        options.num_replicas = options.executable_build_options.num_replicas = self.device_count
        ids = np.array([[device.id] for device in self._all], np.int32)
        options.device_assignment = private.DeviceAssignment.create(ids)
        if self.platform == "cpu":
            options.env_option_overrides = CPU_OPTIONS
        return options

    def put(self, shards: Sequence[np.ndarray[Any, Any]], donate: bool = False) -> DeviceTensor:
        if self._meeting and len(shards) == 1 and not donate:  # what all processes should have alike
            self._meeting.note(raw(shards[0]))
        shards = list(shards) * len(self.here) if len(shards) == 1 else shards
        if len(shards) != len(self.here):
            raise EngineError(f"put needs one array or {len(self.here)}, one per device, got {len(shards)}")
        aval = aval_of(shards[0].shape, shards[0].dtype)
        if any((shard.shape, shard.dtype) != aval[:2] for shard in shards):
            got = ", ".join(f"{shard.dtype}{list(shard.shape)}" for shard in shards)
            raise EngineError(f"put needs shards of one shape and type, got {got}")
        from_numpy(aval.dtype)
        arrays = [put(shard, aval, device, donate) for shard, device in zip(shards, self._own, strict=True)]
        single, whole = len(self._devices) == 1, jaxlib().ArrayImpl
        argument = arrays[0] if single else whole(aval, on_each(self._devices), arrays, True, True)
        return XlaTensor(argument, self._devices, aval)

    def let_go(self) -> None:
        jaxlib().collect_garbage()
        _malloc_trim()(0)

    def usable(self, array: np.ndarray[Any, Any]) -> bool:
        return self.platform == "cpu" and array.ctypes.data % ALIGNMENT == 0

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        # Whole pages are usable, and return to the system when the array is freed.
        size = math.prod(shape) * dtype.itemsize
        pages = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return np.frombuffer(pages, np.uint8, size).view(dtype).reshape(shape)


def _with_one_result(module: HloModuleProto) -> HloModuleProto:
    """Return the module with aliases as StableHLO has them: a tuple of one result is that result, without an index."""
    if len(module.host_program_shape.result.tuple_shapes) != 1 or not module.input_output_alias.entries:
        return module
    module = HloModuleProto.FromString(module.SerializeToString())
    for entry in module.input_output_alias.entries:
        del entry.output_shape_index[:]
    return module


@functools.cache
def _malloc_trim() -> Any:
    """Return glibc's `malloc_trim`, which returns freed memory. Heaps by themselves return only their ends."""
    return getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)


@functools.cache
def xla_runtime(platform: str, degree: int) -> XlaRuntime:
    """Return the runtime for `platform` ("cpu" or "cuda") with `degree` devices, after a self-test.

    CPU devices are virtual, so their number is not limited by the machine. Raises EngineError if there are fewer
    devices than `degree`, if jaxlib is missing or of an untested version, or if it computes wrong results. Raises
    ConfigError if `degree` is more than there can be.
    """
    check_degree(degree)
    found = devices(platform, degree)
    runtime = XlaRuntime(platform, found)
    if degree == 1:
        self_test(runtime)
    else:
        xla_runtime(platform, 1)
    if found.meeting:
        reach_test(runtime)
    return runtime


def canary(_: HloScribe) -> Tensor:
    """Row sums of squares of a product. With its default options, jaxlib 0.10.2 gets the last rows wrong."""
    rows = dtype_named("f32")[32769, 3].Parameter(parameter_number=0)
    matrix = dtype_named("f32")[3, 3].Parameter(parameter_number=1)
    product = hlo.dot(matrix, rows, contract=([1], [1]))  # [3, 32769]
    return hlo.sum(product * product, 0)


def self_test(runtime: XlaRuntime) -> None:
    """Raise EngineError unless the canary's result equals NumPy's."""
    rows = np.zeros((32769, 3), np.float32)
    rows[:, 0] = np.arange(len(rows))
    (got,) = runtime.compile(compile_py_func(canary))(runtime.put([rows]), runtime.put([np.eye(3, dtype=np.float32)]))
    wrong = np.flatnonzero(got.numpy() != rows[:, 0] ** 2)
    if wrong.size:
        raise EngineError(
            f"{runtime.description} computes wrong results: {wrong.size} of {len(rows)} rows of the self-test differ, "
            f"the first at {wrong[0]}. Use another version of jaxlib."
        )


def reach_test(runtime: XlaRuntime) -> None:
    """Raise EngineError unless all devices of all processes reach each other."""

    def gathered(_: HloScribe) -> Tensor:
        return hlo.all_gather(dtype_named("s32")[1].Parameter(parameter_number=0), runtime.device_count, 0)

    own = runtime.put([np.array([number], np.int32) for number in runtime.here], donate=True)
    with _quiet():
        numbers = runtime.compile(compile_py_func(gathered))(own)[0].numpy().tolist()
    if numbers != [*range(runtime.device_count)]:
        raise EngineError(f"{runtime.description}: the devices are 0, 1, … in this order, but they say {numbers}")


@contextmanager
def _quiet() -> Iterator[None]:
    """Send what Gloo says to standard output, which others may read, to standard error."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
