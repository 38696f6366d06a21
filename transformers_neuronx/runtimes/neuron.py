"""Neuron's runtime, through `torch_neuronx`: programs are NEFFs, and tensors are in the memory of NeuronCores.

It calls what the original library's sources call of `torch.classes.neuron` and `torch.ops.neuron`. It has been tested
with a stand-in for both, never on a device.
"""

from __future__ import annotations

import functools
import importlib
import logging
import math
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from transformers_neuronx import env
from transformers_neuronx.errors import ConfigError, EngineError
from transformers_neuronx.neuron.compiling import (
    INSTALL,
    compile_module,
    compile_target,
    compiler_version,
    flags,
    time_limit,
)
from transformers_neuronx.neuron.form import neuron_form
from transformers_neuronx.neuron.metaneff import metaneff_of
from transformers_neuronx.neuron.rules import check
from transformers_neuronx.neuron.targets import Target
from transformers_neuronx.pyhlo import HloModuleProto
from transformers_neuronx.pyhlo.dtypes import numpy_to_torch, torch_to_numpy
from transformers_neuronx.runtimes.base import DeviceTensor, Executable, MemoryStats
from transformers_neuronx.runtimes.signature import Aval, Signature, aval_of
from transformers_neuronx.version import __version__

if TYPE_CHECKING:
    import torch

_LOG = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]

_DEVICES = threading.Lock()  # the original also loads programs and tensors one at a time

# Types that Neuron stores as another type with the same number of bits.
KEPT_AS: Mapping[str, Any] = {"uint32": np.int32, "uint16": np.int16, "float8_e4m3fn": np.int8, "float8_e5m2": np.int8}


@functools.cache
def _library() -> Any:
    """Return PyTorch with Neuron's classes and operations, which importing `torch_neuronx` adds."""
    import torch

    try:
        importlib.import_module("torch_neuronx")
        torch.classes.neuron.ParallelModel  # noqa: B018
    except (ImportError, RuntimeError, AttributeError) as error:
        raise EngineError(f"the neuron runtime needs torch-neuronx to run programs: {INSTALL} ({error})") from error
    return torch


@contextmanager
def _engine_errors(what: str) -> Iterator[None]:
    """Turn errors of Neuron's library into EngineError."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, EngineError):
            raise
        raise EngineError(f"{what} failed on the device: {error}") from error


class Memory:
    """An array on every core, as `torch_neuronx` stores it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Lease:
    """Reserves memory: as long as this object exists, no other tensor gets it."""


class NeuronTensor:
    """One array per core, all of one shape. It stays on the host until a program needs it on the devices."""

    def __init__(
        self,
        aval: Aval,
        cores: int,
        host: Sequence[Array] = (),
        memory: Memory | None = None,
        lease: Lease | None = None,
    ) -> None:
        self.aval = aval
        self.cores = cores
        self.host = host
        self.memory = memory
        self.lease = lease
        self.donated = False
        self.used = False  # by a program, as an operand that changes from call to call

    @property
    def shape(self) -> tuple[int, ...]:
        return self.aval.shape

    @property
    def nbytes(self) -> int:
        return self.aval.nbytes * self.cores

    def on_device(self) -> Memory:
        """Return its memory on the devices, after moving it there if needed."""
        if self.memory is None:
            with _DEVICES, _engine_errors("bringing a tensor to the devices"):
                self.memory = Memory(_library().ops.neuron._parallel_to_neuron(self.for_device()))
            self.host = ()
        return self.memory

    def for_device(self) -> list[torch.Tensor]:
        """Return its shards in the form that Neuron takes."""
        kept = (array.view(KEPT_AS.get(array.dtype.name, array.dtype)) for array in self.host)
        return [numpy_to_torch(array).reshape(self.shape) for array in kept]

    def numpy(self) -> Array:
        return self.shards()[0]

    def shards(self) -> list[Array]:
        if self.memory is None:
            return list(self.host)
        with _engine_errors("the program"):
            found = _library().ops.neuron._parallel_from_neuron(self.memory.tensor)
        shards = found if isinstance(found, list) else [found]
        return [torch_to_numpy(shard).view(self.aval.dtype).reshape(self.shape) for shard in shards]


class NeuronExecutable:
    """A NEFF and, once it runs, the memory of its results and of its operands from the host."""

    def __init__(self, runtime: NeuronRuntime, module: HloModuleProto, neff: bytes) -> None:
        self.runtime, self.module, self.neff = runtime, module, neff
        self.signature = Signature(module)
        self.metaneff = metaneff_of(module)
        sides = self.metaneff.input_tensors, self.metaneff.output_tensors
        self.names = [[each.name.decode() for each in side] for side in sides]
        self._given: dict[int, Memory] = {}  # by parameter: memory that is written at every call
        self._free: dict[int, list[Memory]] = {}  # by result: memory that no tensor has
        self._sets: dict[tuple[int, ...], tuple[Any, list[weakref.ref[Memory]]]] = {}

    @functools.cached_property
    def model(self) -> Any:
        """The NEFF, loaded on the devices."""
        with _DEVICES, _engine_errors(f"loading {self.signature.name}"):
            count = self.runtime.device_count
            model = _library().classes.neuron.ParallelModel(self.neff, count, 0, count)
            model.load()
        return model

    def __call__(self, *tensors: Any) -> list[DeviceTensor]:
        self.signature.take(tensors)
        with _engine_errors(self.signature.name):
            inputs = [self._brought(number, tensor) for number, tensor in enumerate(tensors)]
            results = [self._result(number, tensors) for number in range(len(self.signature.results))]
            outputs = [result.on_device() for result in results]
            sets = [self._set(names, memory) for names, memory in zip(self.names, (inputs, outputs), strict=True)]
            _library().ops.neuron._parallel_run_neuron(self.model, *sets)
        return list(results)

    def _brought(self, number: int, tensor: NeuronTensor) -> Memory:
        """Return an operand's memory. Operands that come from the host at every call always use the same memory."""
        if tensor.memory is not None or tensor.used or number in self.signature.donated:
            return tensor.on_device()
        tensor.used = True
        if number not in self._given:
            self._given[number] = Memory(_library().ops.neuron._parallel_to_neuron(tensor.for_device()))
        else:
            _library().ops.neuron._parallel_write_neuron(self._given[number].tensor, tensor.for_device())
        return self._given[number]

    def _result(self, number: int, tensors: Sequence[NeuronTensor]) -> NeuronTensor:
        """Return a tensor for a result, in the memory of a parameter or in memory that no tensor has."""
        aval, cores = self.signature.results[number], self.runtime.device_count
        if (parameter := self.signature.aliases.get(number)) is not None:
            taken = tensors[parameter]
            return NeuronTensor(aval, taken.cores, memory=taken.memory, lease=taken.lease)
        free = self._free.setdefault(number, [])
        if not free:
            free.append(NeuronTensor(aval, cores, [np.zeros(*aval[:2])] * cores).on_device())
        lease, memory = Lease(), free.pop()
        weakref.finalize(lease, free.append, memory)
        return NeuronTensor(aval, cores, memory=memory, lease=lease)

    def _set(self, names: list[str], memory: list[Memory]) -> Any:
        """Return these tensors in the form that Neuron takes. Most calls have the same ones as the call before."""
        key = (id(names), *map(id, memory))
        known = self._sets.get(key)
        if known and all(reference() is each for reference, each in zip(known[1], memory, strict=True)):
            return known[0]
        self._sets = {k: known for k, known in self._sets.items() if all(reference() for reference in known[1])}
        tensors = _library().classes.neuron.ParallelTensorSet(names, self.runtime.device_count)
        tensors.init()
        for number, each in enumerate(memory):
            tensors.add(number, each.tensor)
        self._sets[key] = tensors, [weakref.ref(each) for each in memory]
        return tensors

    def memory(self) -> MemoryStats:
        """Return the memory without temporaries, which neuronx-cc does not report."""
        given, made = ([each.nbytes for each in side] for side in (self.signature.parameters, self.signature.results))
        return MemoryStats(sum(given), sum(made), sum(made[number] for number in self.signature.aliases), 0)

    @functools.cached_property
    def form(self) -> HloModuleProto:
        """The module that the compiler was given."""
        return neuron_form(self.module)

    def text(self) -> str:
        return self.runtime.module_text(self.form)

    def files(self) -> Mapping[str, bytes]:
        formed = self.form.SerializeToString(deterministic=True)
        return {"neuron.hlo.pb": formed, "neff": self.neff, "metaneff": self.metaneff.SerializeToString()}

    def serialize(self) -> bytes:
        return self.neff


class NeuronRuntime:
    """`degree` NeuronCores, starting with the first one that this process may use.

    Without a `device`, programs are only compiled, and tensors stay on the host.
    """

    suffix, lost = "neff", ""
    panels = loops = loads_lazily = scatters = False

    def __init__(self, degree: int, device: bool = True) -> None:
        self.device_count, self.here = degree, range(degree)
        self.device = device
        self.target = _target_for(degree)
        self._stopped = threading.Event()

    @property
    def description(self) -> str:
        cores = "one NeuronCore" if self.device_count == 1 else f"{self.device_count} NeuronCores"
        return f"Neuron (neuronx-cc {compiler_version()}), {cores}, {self.target.name}"

    @property
    def patience(self) -> float:
        return time_limit() or math.inf

    @functools.cached_property
    def fingerprint(self) -> Mapping[str, str]:
        return dict(
            platform="neuron",
            compiler=compiler_version(),
            target=self.target.name,
            flags=" ".join(flags()),
            cores=str(self.device_count),
            form=__version__,
        )

    def compile(self, module: HloModuleProto) -> Executable:
        formed = neuron_form(module)
        for finding in check(formed, self.target.name):
            _LOG.warning("%s: neuronx-cc may refuse this: %s", module.name, finding)
        return self.load(compile_module(formed, self._stopped), module)

    def stop(self) -> None:
        self._stopped.set()
        self._stopped = threading.Event()

    def load(self, data: bytes, module: HloModuleProto) -> Executable:
        executable = NeuronExecutable(self, module, data)
        if self.device:
            executable.model  # noqa: B018
        return executable

    def attends_in_place(self, cached: str, head_dim: int) -> bool:
        return False

    @property
    def pages(self) -> bool:
        return False

    def spent(self) -> Mapping[str, tuple[int, float]]:
        return {}

    def module_text(self, module: HloModuleProto) -> str:
        from transformers_neuronx.runtimes.xla import module_text

        return module_text(module)

    def put(self, shards: Sequence[Array], donate: bool = False) -> DeviceTensor:
        if not donate:  # the caller may write to its arrays again
            shards = [np.array(shard) for shard in shards]
        shards = list(shards) * self.device_count if len(shards) == 1 else list(shards)
        if len(shards) != self.device_count:
            raise EngineError(f"put needs one array or {self.device_count}, one per core, got {len(shards)}")
        aval = aval_of(shards[0].shape, shards[0].dtype)
        if any((shard.shape, shard.dtype) != aval[:2] for shard in shards):
            got = ", ".join(f"{shard.dtype}{list(shard.shape)}" for shard in shards)
            raise EngineError(f"put needs shards of one shape and type, got {got}")
        tensor = NeuronTensor(aval, self.device_count, shards)
        if donate and self.device:
            tensor.on_device()
        return tensor

    def let_go(self) -> None:
        pass  # arrays are freed with their tensors

    def usable(self, array: Array) -> bool:
        return True

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        return np.empty(shape, dtype)


def _target_for(degree: int) -> Target:
    """Return the compiler's target, after checking that it and this process have `degree` cores."""
    target = compile_target()
    if degree not in target.degrees:
        raise ConfigError(
            f"tp_degree must be one of {', '.join(map(str, target.degrees))} on {target.name}, got {degree}"
        )
    allowed = _cores_allowed()
    if allowed is not None and degree > allowed:
        raise ConfigError(
            f"tp_degree={degree} needs that many NeuronCores, but {env.VISIBLE_CORES.name} and {env.NUM_CORES.name} "
            f"allow this process {allowed}"
        )
    return target


def _cores_allowed() -> int | None:
    """Return how many cores the environment allows this process, or None. NEURON_RT_VISIBLE_CORES has precedence."""
    visible, count = env.VISIBLE_CORES.get().replace(" ", ""), env.NUM_CORES.get()
    try:
        if visible:
            ranges = [part.partition("-") for part in visible.split(",")]
            return sum(int(last or first) - int(first) + 1 for first, _, last in ranges)
        return int(count) if count else None
    except ValueError:
        raise ConfigError(
            f"{env.VISIBLE_CORES.name} must list cores, such as 0-3,6, and {env.NUM_CORES.name} must be a number, "
            f"got {visible!r} and {count!r}"
        ) from None


def neuron_runtime(degree: int, device: bool = True) -> NeuronRuntime:
    """Return the runtime with `degree` NeuronCores. Without a `device` it compiles, but runs nothing."""
    if device:
        _library()
    return NeuronRuntime(degree, device)
