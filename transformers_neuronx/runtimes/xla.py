"""XLA's runtimes, through jaxlib's PJRT clients: `cpu` and `cuda`.

All private parts of jaxlib that the project uses are in this file, behind a check of its version and a self-test.
The client is our own: it works whether or not JAX is imported or configured, and does not affect JAX.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import math
import mmap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from transformers_neuronx import env, hlo
from transformers_neuronx.compiler import compile_py_func
from transformers_neuronx.config import check_degree
from transformers_neuronx.errors import EngineError
from transformers_neuronx.pyhlo import HloModuleProto, HloScribe, Tensor, dtype_named
from transformers_neuronx.pyhlo.dtypes import from_numpy
from transformers_neuronx.runtimes import kernels
from transformers_neuronx.runtimes.base import DeviceTensor, Executable, MemoryStats
from transformers_neuronx.runtimes.processor import processor
from transformers_neuronx.runtimes.signature import Aval, Signature, aval_of

# The versions that this file was tested with, from OLDEST up to but not including NEWEST.
OLDEST, NEWEST = (0, 10, 2), (0, 13)

ALIGNMENT = 64  # bytes, of arrays that XLA:CPU uses in place

# jaxlib 0.10.2 and later fuse a dot with the reduction after it. Some shapes then give wrong results without an error
# (jax#39103), others crash (jax#39257, jax#40412). The first option drops that fusion and keeps the fast product.
# jaxlib also drops optimization barriers before it schedules. Then all quantized weights are widened at the start, and
# a program needs the memory of an unquantized model. The second option keeps the barriers.
CPU_OPTIONS = [
    ("xla_cpu_experimental_ynn_fusion_type", "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"),
    ("xla_disable_hlo_passes", "cse_barrier_expander"),
]


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
def _jaxlib() -> Any:
    """Return jaxlib's extension module."""
    try:
        version = metadata.version("jaxlib")
    except metadata.PackageNotFoundError:
        raise EngineError("the cpu and cuda runtimes need jaxlib, which is not installed: pip install jaxlib") from None
    check_version(version)
    env.LOG_LEVEL.set_default()
    with suppress(Exception):  # otherwise jaxlib imports JAX during the first call, and swallows Ctrl-C there
        importlib.import_module("jax")
    return importlib.import_module("jaxlib._jax")


@functools.cache
def _hlo() -> Any:
    _jaxlib()
    return importlib.import_module("jaxlib._hlo")


@functools.cache
def _on_device(device: Any) -> Any:
    """Return the sharding "all on `device`". jaxlib 0.10 uses two attributes that only JAX's own subclass has."""

    class OnDevice(_jaxlib().SingleDeviceSharding):  # type: ignore[misc]
        memory_kind = None

        def _to_xla_hlo_sharding(self, rank: int) -> Any:
            return _hlo().HloSharding.replicate()

    return OnDevice(device)


def module_text(module: HloModuleProto) -> str:
    """Return a module's HLO as XLA prints it."""
    return str(_hlo().XlaComputation(module.SerializeToString()).as_hlo_text())


@contextmanager
def _engine_errors(what: str) -> Iterator[None]:
    """Turn jaxlib's errors into EngineError."""
    try:
        yield
    except _jaxlib().JaxRuntimeError as error:
        raise EngineError(f"{what} failed on the device: {error}") from error


class XlaTensor:
    """One array per device, all of one shape."""

    def __init__(self, arrays: list[Any], devices: Any, aval: Aval) -> None:
        self.arrays = arrays
        self.devices = devices
        self.aval = aval
        self.donated = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.aval.shape

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    @functools.cached_property
    def argument(self) -> Any:
        """The arrays as one argument of an executable."""
        if len(self.arrays) == 1:
            return self.arrays[0]
        jaxlib = _jaxlib()
        everywhere = jaxlib.GSPMDSharding(self.devices, _hlo().OpSharding())
        return jaxlib.ArrayImpl(self.aval, everywhere, self.arrays, True, True)

    def numpy(self) -> np.ndarray[Any, Any]:
        return _on_host(self.arrays[0])

    def shards(self) -> list[np.ndarray[Any, Any]]:
        return [_on_host(array) for array in self.arrays]


def _on_host(array: Any) -> np.ndarray[Any, Any]:
    with _engine_errors("the program"):
        return np.asarray(array._single_device_array_to_np_array_did_copy()[0])


class XlaExecutable:
    """A loaded program."""

    def __init__(self, loaded: Any, devices: Any, module: HloModuleProto, data: bytes | None) -> None:
        self.loaded = loaded
        self.data = data
        self.devices = devices
        self.signature = Signature(module)
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
        with _engine_errors(self.signature.name):
            before, after = ([x.argument for x in part] for part in (tensors[: place.start], tensors[place.stop :]))
            arguments = [*before, *as_arguments, *after]
            results = self.loaded.execute_sharded(arguments).disassemble_into_single_device_arrays()
        return [
            XlaTensor(arrays, self.devices, aval) for arrays, aval in zip(results, self.signature.results, strict=True)
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
    """A PJRT client and the devices that a program of the given tensor-parallel degree runs on."""

    suffix, patience = "executable", 600.0
    loops = True

    def __init__(self, client: Any, platform: str, degree: int) -> None:
        self.platform = platform
        self.device_count = degree
        self._client = client
        self._device_tuple = tuple(client.devices()[:degree])
        self._devices = _jaxlib().DeviceList(self._device_tuple)

    @property
    def description(self) -> str:
        kind = self._device_tuple[0].device_kind
        count = "one device" if self.device_count == 1 else f"{self.device_count} devices"
        return f"XLA:{self.platform.upper()} (jaxlib {metadata.version('jaxlib')}), {count}, {kind}"

    @functools.cached_property
    def fingerprint(self) -> Mapping[str, str]:
        facts = dict(
            platform=self.platform,
            jaxlib=metadata.version("jaxlib"),
            engine=str(self._client.platform_version),
            devices=f"{self.device_count} {self._device_tuple[0].device_kind}",
            options=str(CPU_OPTIONS if self.platform == "cpu" else []),
            XLA_FLAGS=env.XLA_FLAGS.get(),
        )
        return facts | processor() | dict(kernels=kernels.fingerprint()) if self.platform == "cpu" else facts

    def compile(self, module: HloModuleProto) -> Executable:
        jaxlib = _jaxlib()
        try:
            given = kernels.with_kernels(module) if self.platform == "cpu" else module
            stablehlo = jaxlib.mlir.hlo_to_stablehlo(given.SerializeToString())
            loaded = self._client.compile_and_load(stablehlo, self._devices, self._options())
        except jaxlib.JaxRuntimeError as error:
            raise EngineError(f"XLA:{self.platform.upper()} refused the module {module.name!r}: {error}") from error
        return XlaExecutable(loaded, self._devices, module, self._as_bytes(loaded))

    def stop(self) -> None:
        pass  # XLA finishes every compilation that it starts

    def _as_bytes(self, loaded: Any) -> bytes | None:
        # Before the first run: jaxlib 0.10.2 cannot serialize a program with a sort that has run, and leaves out the
        # code of one that it has loaded itself.
        try:
            return bytes(self._client.serialize_executable(loaded))
        except _jaxlib().JaxRuntimeError:
            return None

    def load(self, data: bytes, module: HloModuleProto) -> Executable:
        with _engine_errors(f"loading {module.name}"):
            loaded = self._client.deserialize_executable(data, self._devices, self._options())
        return XlaExecutable(loaded, self._devices, module, data)

    @property
    def panels(self) -> bool:
        return self.platform == "cpu" and kernels.level() != "off"

    def attends_in_place(self, cached: str, head_dim: int) -> bool:
        return self.platform == "cpu" and kernels.attends_in_place(cached, head_dim)

    @property
    def pages(self) -> bool:
        return True

    def spent(self) -> Mapping[str, tuple[int, float]]:
        return kernels.spent() if self.platform == "cpu" else {}

    def module_text(self, module: HloModuleProto) -> str:
        return module_text(module)

    def _options(self) -> Any:
        jaxlib = _jaxlib()
        options = jaxlib.CompileOptions()
        options.num_replicas = options.executable_build_options.num_replicas = self.device_count
        ids = np.array([[device.id] for device in self._device_tuple], np.int32)
        options.device_assignment = jaxlib.DeviceAssignment.create(ids)
        if self.platform == "cpu":
            options.env_option_overrides = CPU_OPTIONS
        return options

    def put(self, shards: Sequence[np.ndarray[Any, Any]], donate: bool = False) -> DeviceTensor:
        shards = list(shards) * self.device_count if len(shards) == 1 else shards
        if len(shards) != self.device_count:
            raise EngineError(f"put needs one array or {self.device_count}, one per device, got {len(shards)}")
        aval = aval_of(shards[0].shape, shards[0].dtype)
        if any((shard.shape, shard.dtype) != aval[:2] for shard in shards):
            got = ", ".join(f"{shard.dtype}{list(shard.shape)}" for shard in shards)
            raise EngineError(f"put needs shards of one shape and type, got {got}")
        from_numpy(aval.dtype)
        arrays = [_put(shard, aval, device, donate) for shard, device in zip(shards, self._device_tuple, strict=True)]
        return XlaTensor(arrays, self._devices, aval)

    def let_go(self) -> None:
        _jaxlib().collect_garbage()
        _malloc_trim()(0)

    def usable(self, array: np.ndarray[Any, Any]) -> bool:
        return self.platform == "cpu" and array.ctypes.data % ALIGNMENT == 0

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        # Whole pages are usable, and return to the system when the array is freed.
        size = math.prod(shape) * dtype.itemsize
        pages = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return np.frombuffer(pages, np.uint8, size).view(dtype).reshape(shape)


def _put(array: np.ndarray[Any, Any], aval: Aval, device: Any, donate: bool) -> Any:
    jaxlib = _jaxlib()
    # The caller may write to its array again. With zero copy, a program would see that.
    how = jaxlib.HostBufferSemantics.ZERO_COPY if donate else jaxlib.HostBufferSemantics.IMMUTABLE_ONLY_DURING_CALL
    return jaxlib.batched_device_put(
        aval,
        _on_device(device),
        [np.ascontiguousarray(array).reshape(aval.shape)],
        [device],
        committed=True,
        host_buffer_semantics=how,
        enable_x64=True,
    )


@functools.cache
def _cpu_client(devices: int) -> Any:
    _register_kernels()
    return _jaxlib().get_tfrt_cpu_client(asynchronous=True, num_devices=devices)


@functools.cache
def _malloc_trim() -> Any:
    """Return glibc's `malloc_trim`, which returns freed memory. Heaps by themselves return only their ends."""
    return getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)


@functools.cache
def _register_kernels() -> None:
    for target, handler in kernels.handlers().items():
        _jaxlib().register_custom_call_target(target, handler, "Host", 1)


@functools.cache
def _cuda_client() -> Any:
    _jaxlib()
    from jaxlib import xla_client

    if not xla_client.pjrt_plugin_loaded("cuda"):
        xla_client.load_pjrt_plugin_dynamically("cuda", str(_cuda_plugin()))
    if not xla_client.pjrt_plugin_initialized("cuda"):
        xla_client.initialize_pjrt_plugin("cuda")
    return xla_client.make_c_api_client("cuda", xla_client.generate_pjrt_gpu_plugin_options())


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


@functools.cache
def xla_runtime(platform: str, degree: int) -> XlaRuntime:
    """Return the runtime for `platform` ("cpu" or "cuda") with `degree` devices, after a self-test.

    CPU devices are virtual, so their number is not limited by the machine. Raises EngineError if there are fewer
    devices than `degree`, if jaxlib is missing or of an untested version, or if it computes wrong results. Raises
    ConfigError if `degree` is more than there can be.
    """
    check_degree(degree)
    client = _cpu_client(degree) if platform == "cpu" else _cuda_client()
    if client.device_count() < degree:
        raise EngineError(
            f"tp_degree={degree} needs that many devices, but {platform} has {client.device_count()}: lower tp_degree"
        )
    runtime = XlaRuntime(client, platform, degree)
    if degree == 1:
        self_test(runtime)
    else:
        xla_runtime(platform, 1)
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
