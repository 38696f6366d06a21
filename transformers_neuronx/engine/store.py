"""The compiled programs of one model: from an artifact, from the cache on disk, or compiled, several at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from copy import copy
from functools import partial
from time import perf_counter
from typing import NamedTuple, TypeVar

from transformers_neuronx.engine.compile_cache import (
    ArtifactSource,
    LazyExecutable,
    SavedModule,
    WrittenModules,
    build,
)  # fmt: skip
from transformers_neuronx.engine.keys import ProgramKey, Segment, artifact_key, program_name
from transformers_neuronx.engine.kv_cache import CacheLayout
from transformers_neuronx.engine.loading import Progress
from transformers_neuronx.engine.programs import Programs
from transformers_neuronx.errors import EngineError
from transformers_neuronx.pyhlo import HloModuleProto
from transformers_neuronx.runtimes.base import Executable, Runtime
from transformers_neuronx.weights.lora import AdapterLayout

Built = list[tuple[Segment, Executable]]
Overlap = Callable[[], object]
K = TypeVar("K", bound=ProgramKey)
T = TypeVar("T")


class StoredProgram(NamedTuple):
    """A program, compiled."""

    saved: SavedModule
    executable: Executable

    @property
    def name(self) -> str:
        return self.saved.name

    @property
    def module(self) -> HloModuleProto:
        return self.saved.message()

    @property
    def is_loaded(self) -> bool:
        return not isinstance(self.executable, LazyExecutable) or self.executable.is_loaded


class ProgramStore:
    """The programs of a model by key, with at most `workers` compiled at a time: None, as many as there are cores."""

    def __init__(self, runtime: Runtime, programs: Programs, workers: int | None) -> None:
        self.source: ArtifactSource | None = None  # programs from an artifact
        self.before: WrittenModules | None = None  # modules that were written before
        self.stored: dict[str, StoredProgram] = {}  # by module identity
        self.identities: dict[str, str] = {}  # module identities, by `artifact_key`
        self.programs = programs
        self._seconds: list[float] = []  # of each compilation
        self._runtime, self._workers = runtime, workers
        self._built: dict[ProgramKey, Built] = {}

    def over(
        self, cache: CacheLayout, adapters: AdapterLayout | None = None, features: tuple[int, ...] = ()
    ) -> ProgramStore:
        """Return a store of the same model's programs for a cache of another layout, for adapters, and with features of
        tokens. Artifacts have those of all.
        """
        others = copy(self)
        others.programs, others._built = self.programs.over(cache, adapters, features), {}
        return others

    @property
    def compile_seconds(self) -> float:
        return sum(self._seconds)

    def compile(
        self,
        wanted: Iterable[ProgramKey],
        progress: Progress = lambda done: None,
        overlap: Overlap = lambda: None,
    ) -> None:
        """Compile the missing programs in parallel, and call `overlap` at the same time.

        `progress` is called with the name of each finished program.
        """

        def build_parts(key: ProgramKey) -> None:
            parts = key.segments(self.programs)
            built = {}
            for segment in dict.fromkeys(parts):
                entry = artifact_key(key, segment, self.programs.form)
                module = self.source.module(entry) if self.source else None
                if module is None:
                    module = self._module(key, entry, partial(self.written, key, segment))
                built[segment] = self.build(module, entry)
            self._built[key] = [(segment, built[segment]) for segment in parts]

        self.each(self.missing(wanted), build_parts, progress, overlap)

    def _module(self, key: ProgramKey, entry: str, write: Callable[[], HloModuleProto]) -> SavedModule:
        """Return a module that was written before, or write it now. It depends on the model, the key and the entry."""
        if self.before is None:
            return SavedModule.of(write())
        entry = f"{entry} {key!r}"  # names of keys leave out what the model of an artifact determines
        module = self.before.read(entry)
        if module is None:
            module = SavedModule.of(write())
            self.before.write(entry, module)
        return module

    def written(self, key: ProgramKey, segment: Segment) -> HloModuleProto:
        """Write a part of a program. It has a readable name."""
        module = key.written(self.programs, segment)
        module.name = program_name(key, segment)
        return module

    def compile_modules(
        self, keys: Sequence[K], write: Callable[[K], HloModuleProto], progress: Progress = lambda done: None
    ) -> dict[K, Executable]:
        """Compile programs that artifacts do not have, in parallel. `write` returns the module of a key, which depends
        on the model and the key alone.
        """

        def named(key: K) -> HloModuleProto:
            module = write(key)
            module.name = key.name
            return module

        def build_one(key: K) -> Executable:
            return self.build(self._module(key, "apart", partial(named, key)))

        return self.each(keys, build_one, progress)

    def each(
        self,
        keys: Sequence[K],
        make: Callable[[K], T],
        progress: Progress,
        overlap: Overlap = lambda: None,
    ) -> dict[K, T]:
        """Call `make` for each key in parallel, and `overlap` at the same time. Return the results.

        After an error or Ctrl-C, no further ones start.
        """

        def timed(key: K) -> T:
            made = make(key)
            finished.append(perf_counter())
            progress(key.name)
            return made

        finished = [began := perf_counter()]
        with ThreadPoolExecutor(self._workers or os.cpu_count()) as pool:
            running = [pool.submit(timed, key) for key in keys]
            try:
                overlap()
                made = [each.result() for each in running]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self._runtime.stop()
                raise
        self._seconds.append(max(finished) - began)
        return dict(zip(keys, made, strict=True))

    def missing(self, wanted: Iterable[ProgramKey]) -> list[ProgramKey]:
        """Return the keys that are not compiled yet, each once."""
        return [key for key in dict.fromkeys(wanted) if key not in self._built]

    def build(self, module: SavedModule, entry: str = "") -> Executable:
        """Return an executable of `module` for the devices: from the artifact, the cache or the compiler.

        Pass `entry`, the program's `artifact_key`, only if the model and that key alone determine the module.
        """
        executable = build(self._runtime, module, self.source)
        self.stored[module.identity] = StoredProgram(module, executable)
        if entry:
            self.identities[entry] = module.identity
        return executable

    def load(self, key: ProgramKey) -> None:
        """Load a program before it is needed."""
        for _, executable in self.parts(key):
            if isinstance(executable, LazyExecutable):
                executable.loaded()

    def load_one(self) -> bool:
        """Load a program that nothing has needed yet. Return whether one was loaded."""
        found = (executable for _, executable in list(self.stored.values()) if isinstance(executable, LazyExecutable))
        executable = next((each for each in found if not each.is_loaded), None)
        if executable is None:
            return False
        with suppress(EngineError):  # whoever needs it will see
            executable.loaded()
        return executable.is_loaded

    def parts(self, key: ProgramKey) -> Built:
        """Return the executables of a key. Compile them first if they are missing."""
        if key not in self._built:
            self.compile([key])
        return self._built[key]

    @property
    def temporaries(self) -> int:
        """Bytes of temporaries of the largest program that is loaded, on one device."""
        loaded = (program.executable for program in self.stored.values() if program.is_loaded)
        return max((executable.memory().temporaries for executable in loaded), default=0)

    @contextmanager
    def watched(self, watch: Callable[[str, Executable], Executable]) -> Iterator[None]:
        """Replace each executable by `watch(program name, executable)` inside the context."""
        built = self._built
        self._built = {
            key: [(segment, watch(program_name(key, segment), executable)) for segment, executable in parts]
            for key, parts in built.items()
        }
        try:
            yield
        finally:
            self._built = built
