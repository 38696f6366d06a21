"""A runtime whose devices are in worker processes: this one sends them commands, and has no device itself.

All workers get the same commands in the same order, so that they run the same programs together. Commands do not wait,
except for those whose answer is needed. If a worker is lost, what was to be computed fails. The next command that
brings something to the devices starts the workers again, and restores all that can be: arrays that were put, weights
that workers have read, and programs.
"""

from __future__ import annotations

import atexit
import functools
import logging
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from transformers_neuronx.config import check_degree
from transformers_neuronx.config.workers import Workers
from transformers_neuronx.errors import CheckpointError, ConfigError, EngineError
from transformers_neuronx.pyhlo import HloModuleProto
from transformers_neuronx.pyhlo.dtypes import element_type, from_numpy
from transformers_neuronx.runtimes.base import DeviceTensor, Executable, MemoryStats, raw
from transformers_neuronx.runtimes.crew import Crew, Progress
from transformers_neuronx.runtimes.signature import Aval, Signature, aval_of
from transformers_neuronx.runtimes.wire import Bytes, Message
from transformers_neuronx.runtimes.worker_processes import Leader
from transformers_neuronx.version import __version__

_LOG = logging.getLogger(__name__)
_SMALL = 2**16  # bytes; larger arrays may be zeros, which need not be sent

Array = np.ndarray[Any, Any]


class Origin:
    """What is on the workers of an `age`, and lost with them, unless it can be restored on the next ones."""

    def __init__(self, age: int) -> None:
        self.age = age


class Restorable(Origin):
    """What `restore` brings to workers, and to later ones under the same number. It may have several numbers."""

    def __init__(self, runtime: RemoteRuntime, count: int = 1) -> None:
        super().__init__(runtime.age)
        self.runtime, self.number = runtime, runtime.reserve(count)

    def bring(self) -> None:
        """Bring it to the workers that there are now."""
        while True:
            self.age = self.runtime.running()
            self.restore()
            with self.runtime.turn:
                if self.age == self.runtime.age:
                    self.runtime.restorable[self.number] = self
                    return

    @abstractmethod
    def restore(self) -> None: ...


class Put(Restorable):
    """Arrays of this process: one for all devices, one for each, or zeros, of which there is only the shape."""

    def __init__(self, runtime: RemoteRuntime, aval: Aval, arrays: Sequence[Bytes]) -> None:
        super().__init__(runtime)
        self.aval, self.arrays = aval, arrays
        self.bring()

    def restore(self) -> None:
        each = len(self.arrays) // len(self.runtime.ranks)
        data = [self.arrays[rank * each :][:each] for rank in self.runtime.ranks] if each else [self.arrays]
        name = from_numpy(self.aval.dtype).name
        command = dict(do="put", tensor=self.number, dtype=name, shape=self.aval.shape, own=len(data) > 1)
        self.runtime.tell(command, data)


class Read(Restorable):
    """At most `count` weights that each worker reads of a model; what the first says, and marks of what all read."""

    def __init__(self, runtime: RemoteRuntime, model: Mapping[str, Any], count: int, progress: Progress) -> None:
        super().__init__(runtime, count)
        self._model, self._progress = model, progress
        self.says, self.marks = dict[str, Any](), dict[str, str]()
        self.bring()
        self._progress = lambda _: None

    def restore(self) -> None:
        command = dict(do="read", first=self.number, model=self._model)
        self.says, *others = (answer.says for answer in self.runtime.ask(command, progress=self._progress))
        self.marks = dict(self.says["marks"])
        for rank, other in enumerate(others, 1):
            read = other["marks"].items()
            if different := [name for name, mark in read if self.marks.setdefault(name, mark) != mark]:
                raise CheckpointError(
                    f"worker {rank} has another checkpoint than worker 0: {len(different)} tensors differ, the first "
                    f"is {different[0]}"
                )


class RemoteTensor:
    """An array on each device of all workers, which know it by its number."""

    def __init__(self, runtime: RemoteRuntime, number: int, aval: Aval, origin: Origin) -> None:
        self.runtime, self.number, self.aval, self.origin = runtime, number, aval, origin
        self.donated = False

    def __del__(self) -> None:
        self.runtime.freed.append(self.number)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.aval.shape

    @property
    def nbytes(self) -> int:
        return self.aval.nbytes * self.runtime.device_count

    def numpy(self) -> Array:
        return self._arrays(range(1), every=False)[0]

    def shards(self) -> list[Array]:
        return self._arrays(self.runtime.ranks, every=True)

    def _arrays(self, ranks: range, every: bool) -> list[Array]:
        answers = self.runtime.ask(dict(do="fetch", tensor=self.number, every=every), ranks=ranks, of=[self])
        found = (np.frombuffer(data, self.aval.dtype) for answer in answers for data in answer.data)
        return [array.reshape(self.aval.shape) for array in found]


class RemoteExecutable(Restorable):
    """A program that all workers have."""

    def __init__(self, runtime: RemoteRuntime, module: HloModuleProto, data: Bytes | None) -> None:
        super().__init__(runtime)
        self._module, self.signature = module, Signature(module)
        self._data = data
        self._held: tuple[int, tuple[Any, ...]] = -1, ()  # the weights of the last call, and of which age
        self.bring()

    def restore(self) -> None:
        """Load the program, or compile it. CPU workers can run each other's code."""
        module, ranks = self._module.SerializeToString(), self.runtime.ranks
        if self._data is None:
            first = ranks[:1] if self.runtime.platform == "cpu" else ranks
            answers = self.runtime.ask(dict(do="compile", program=self.number), [[module]], ranks=first)
            self._data, ranks = next(iter(answers[0].data), None), ranks[len(first) :]
        how, also = ("compile", []) if self._data is None else ("load", [self._data])
        self.runtime.ask(dict(do=how, program=self.number), [[module, *also]], ranks=ranks)

    def __del__(self) -> None:
        self.runtime.freed.append(self.number)

    def __call__(self, *tensors: Any) -> list[DeviceTensor]:
        runtime, place = self.runtime, self.signature.weights
        with runtime.turn:
            weights, age = tensors[place], runtime.age
            known = self._held[0] == age and self._held[1] == weights
            others = [*tensors[: place.start], *tensors[place.stop :]]
            runtime.check(others if known else tensors)
            self.signature.take(tensors, known)
            for number in self.signature.donated:
                tensors[number].origin = runtime.computed
            first = runtime.reserve(len(self.signature.results))
            command = dict(do="call", program=self.number, others=[tensor.number for tensor in others], first=first)
            if not known:
                command["weights"] = [tensor.number for tensor in weights]
                self._held = age, weights
            runtime.tell(command, of=[self])
        results = enumerate(self.signature.results, first)
        return [RemoteTensor(runtime, number, aval, runtime.computed) for number, aval in results]

    def memory(self) -> MemoryStats:
        return self._memory

    @functools.cached_property
    def _memory(self) -> MemoryStats:
        return MemoryStats(*self._asked("memory").says["bytes"])

    def text(self) -> str:
        return str(self._asked("text").says["text"])

    def files(self) -> Mapping[str, bytes]:
        return {}

    def serialize(self) -> bytes:
        if self._data is None:
            raise EngineError(f"{self.signature.name} cannot be serialized by this engine")
        return bytes(self._data)

    def _asked(self, what: str) -> Message:
        [answer] = self.runtime.ask(dict(do=what, program=self.number), ranks=range(1), of=[self])
        return answer


class RemoteRuntime:
    """The devices of workers."""

    suffix, patience = "executable", 600.0
    loops = loads_lazily = pages = True

    def __init__(self, workers: Workers, platform: str, degree: int) -> None:
        self.platform, self.device_count = platform, degree
        self.here = range(degree)  # what this process puts, and gets, is for all devices
        self.ranks = range(workers.size)
        self._next, self.freed = 1, deque[int]()
        self.restorable: WeakValueDictionary[int, Restorable] = WeakValueDictionary()
        self.turn = threading.RLock()  # who has it may send commands
        self.age, self.computed = 0, Origin(0)
        self._restoring = False
        self._leader = Leader(workers, platform, degree)
        self._crew = Crew(self._leader)
        atexit.register(self.close)
        self.facts = self._begin()

    def reserve(self, count: int) -> int:
        """Return the first of so many numbers that nothing else has."""
        with self.turn:
            first, self._next = self._next, self._next + count
        return first

    def running(self) -> int:
        """Return the age of the workers that run now. Lost ones are started again."""
        with self.turn:
            self._running(())
            return self.age

    def _begin(self) -> dict[str, Any]:
        """Let the workers join each other. Return what the first one says of its devices."""
        facts = self._crew.answers(self._crew.send(dict(do="begin"), answered=True))[0].says
        if (version := facts["version"]) != __version__:
            self._crew.lose(lambda: f"workers have version {version} of this package, not {__version__}")
            raise EngineError(self._crew.lost)
        return facts

    def _restore(self) -> None:
        """Start workers again in place of lost ones. Raises EngineError if these are lost, too."""
        _LOG.warning("%s: starting the workers again", self._crew.lost)
        self._crew = Crew(self._leader)
        self.age += 1
        self.computed = Origin(self.age)
        self.freed.clear()
        if self._begin() != self.facts:
            self._crew.lose(lambda: "workers that came again differ from those before")
            raise EngineError(self._crew.lost)
        self._restoring = True
        try:
            for _, each in sorted(self.restorable.items()):
                each.age = self.age
                each.restore()
        finally:
            self._restoring = False
        _LOG.warning("the workers are back")

    def check(self, used: Sequence[Any]) -> None:
        """Raise EngineError if some of these tensors or programs, or the workers, are lost."""
        if self._crew.lost or any(getattr(each, "origin", each).age != self.age for each in used):
            raise EngineError(self._crew.lost or "what was computed is lost with the workers that had it")

    def tell(self, command: dict[str, Any], data: Sequence[Sequence[Bytes]] = (), of: Sequence[Any] = ()) -> None:
        """Send a command to all workers: with the same data, or each with its own. It uses `of` these."""
        with self.turn:
            self._running(of).send(self._with_freed(command), data)

    def ask(
        self,
        command: dict[str, Any],
        data: Sequence[Sequence[Bytes]] = (),
        ranks: range | None = None,
        of: Sequence[Any] = (),
        progress: Progress = lambda done: None,
    ) -> list[Message]:
        """Send a command to some workers, and return their answers. Raises the error of a worker."""
        with self.turn:
            crew = self._running(of)
            asked = crew.send(command, data, ranks, answered=True, progress=progress)
        return crew.answers(asked)

    def _running(self, used: Sequence[Any]) -> Crew:
        if used or self._restoring:
            self.check(used)
        elif self._crew.lost:
            self._restore()
        return self._crew

    def _with_freed(self, command: dict[str, Any]) -> dict[str, Any]:
        if self.freed:
            command["free"] = [self.freed.popleft() for _ in range(len(self.freed))]
        return command

    @property
    def lost(self) -> str:
        return self._crew.lost

    @property
    def description(self) -> str:
        return f"{len(self.ranks)} worker processes: {self.facts['description']}"

    @property
    def fingerprint(self) -> Mapping[str, str]:
        facts: Mapping[str, str] = self.facts["fingerprint"]
        return facts

    def compile(self, module: HloModuleProto) -> Executable:
        return RemoteExecutable(self, module, None)

    def load(self, data: bytes, module: HloModuleProto) -> Executable:
        return RemoteExecutable(self, module, data)

    def stop(self) -> None:
        pass  # XLA finishes every compilation that it starts

    @property
    def panels(self) -> bool:
        return bool(self.facts["panels"])

    @property
    def scatters(self) -> bool:
        return bool(self.facts["scatters"])

    @functools.cache  # noqa: B019
    def attends_in_place(self, cached: str, head_dim: int) -> bool:
        command = dict(do="attends_in_place", cached=cached, head_dim=head_dim)
        return bool(self.ask(command, ranks=range(1))[0].says["answer"])

    def spent(self) -> Mapping[str, tuple[int, float]]:
        total: dict[str, tuple[int, float]] = {}
        for answer in self.ask(dict(do="spent")):
            for name, (calls, seconds) in answer.says["spent"].items():
                before = total.get(name, (0, 0.0))
                total[name] = before[0] + calls, before[1] + seconds
        return total

    def module_text(self, module: HloModuleProto) -> str:
        from transformers_neuronx.runtimes.xla import module_text

        return module_text(module)

    def put(self, shards: Sequence[Array], donate: bool = False) -> DeviceTensor:
        if len(shards) not in (1, self.device_count):
            raise EngineError(f"put needs one array or {self.device_count}, one per device, got {len(shards)}")
        aval = aval_of(shards[0].shape, shards[0].dtype)
        if any((shard.shape, shard.dtype) != aval[:2] for shard in shards):
            raise EngineError(f"put needs shards of one shape and type, got {', '.join(str(s.shape) for s in shards)}")
        zeros = len(shards) == 1 and aval.nbytes > _SMALL and not np.frombuffer(raw(shards[0]), np.uint8).any()
        kept = [] if zeros else [raw(shard) if donate else bytes(raw(shard)) for shard in shards]
        put = Put(self, aval, kept)
        return RemoteTensor(self, put.number, aval, put)

    def read(
        self, model: Mapping[str, Any], count: int, progress: Progress
    ) -> tuple[dict[tuple[int | None, str], DeviceTensor], dict[str, str]]:
        """Let each worker read its pieces of a model's weights, at most `count`, as `models.worker` does.

        Return tensors by layer and name, and marks of the checkpoint.
        """
        read = Read(self, model, count, progress)
        found: dict[tuple[int | None, str], DeviceTensor] = {}
        for number, name, shape, keys in read.says["tensors"]:
            tensor = RemoteTensor(self, number, aval_of(tuple(shape), element_type(name).numpy), read)
            found.update(dict.fromkeys(map(tuple, keys), tensor))
        return found, read.marks

    def let_go(self) -> None:
        with self.turn, suppress(EngineError):
            if self.freed and not self._crew.lost:
                self.tell(dict(do="let_go"))

    def close(self) -> None:
        """End the workers."""
        self._leader.dismiss()
        self._crew.lose(lambda: "the workers have been told to end")

    def usable(self, array: Array) -> bool:
        return True

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        return np.empty(shape, dtype)


@functools.cache
def remote_runtime(workers: Workers, platform: str, degree: int) -> RemoteRuntime:
    """Return the runtime over `degree` devices of workers, which are started.

    Raises EngineError if they do not come or cannot work together, and ConfigError if they cannot have equally many.
    """
    check_degree(degree)
    if degree % workers.size:
        raise ConfigError(f"tp_degree must be a multiple of the {workers.size} worker processes, got {degree}")
    return RemoteRuntime(workers, platform, degree)
