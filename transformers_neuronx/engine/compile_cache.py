"""Get an executable for a module: from an artifact, from the cache on disk, or from the compiler.

The cache is a directory of executables, and of modules. An executable is named by a digest of its module and of
everything else it depends on, a module by a digest of the model and the code that writes it. Cached code is executed,
so the directory must belong to the user. A problem with the cache never stops a program: it is logged once, and the
program is compiled. With NEURONX_DUMP_TO, every program is also written to that directory.

What is found is loaded when it is first used: a process needs a few of a model's programs at once, and some never.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from transformers_neuronx import env
from transformers_neuronx.compiler import identity
from transformers_neuronx.errors import EngineError
from transformers_neuronx.pyhlo import HloModuleProto
from transformers_neuronx.runtimes.base import DeviceTensor, Executable, MemoryStats, Runtime
from transformers_neuronx.support import files
from transformers_neuronx.support.user_cache import cache_directory, warn_once

_LOG = logging.getLogger(__name__)

MAGIC = b"transformers_neuronx executable 1\n"  # a cache entry: this, the SHA-256 of the rest, and what is cached
ARTIFACT = "an artifact"


@dataclass(frozen=True)
class SavedModule:
    """A module as bytes: as a message, it would take several times the memory. Its `identity` is that of `compiler`."""

    name: str
    identity: str
    data: bytes

    @classmethod
    def of(cls, module: HloModuleProto) -> SavedModule:
        return cls(module.name, identity(module), module.SerializeToString(deterministic=True))

    def message(self) -> HloModuleProto:
        return HloModuleProto.FromString(self.data)


class ArtifactSource(NamedTuple):
    """The programs of an artifact: modules by `artifact_key`, executables by the `identity` of their module."""

    module: Callable[[str], SavedModule | None]
    executable: Callable[[str], bytes | None]


class LazyExecutable:
    """An executable that was found, and is loaded when it is first used. Several threads may use it.

    `make` loads it, or compiles it again if that fails.
    """

    def __init__(self, data: bytes, make: Callable[[], Executable]) -> None:
        self._data, self._make = data, make
        self._turn = threading.Lock()
        self._loaded: Executable | None = None

    @property
    def is_loaded(self) -> bool:
        return self._loaded is not None

    def loaded(self) -> Executable:
        """Return the executable. Raises EngineError if it cannot be loaded and cannot be compiled."""
        with self._turn:
            if self._loaded is None:
                self._loaded = self._make()
            return self._loaded

    def __call__(self, *tensors: DeviceTensor) -> list[DeviceTensor]:
        return (self._loaded or self.loaded())(*tensors)

    def memory(self) -> MemoryStats:
        return self.loaded().memory()

    def text(self) -> str:
        return self.loaded().text()

    def files(self) -> Mapping[str, bytes]:
        return self.loaded().files()

    def serialize(self) -> bytes:
        return self._loaded.serialize() if self._loaded else self._data


def build(runtime: Runtime, module: SavedModule, source: ArtifactSource | None = None) -> Executable:
    """Return an executable of `module`. Raises EngineError with the compiler's message."""
    data, where = source.executable(module.identity) if source else None, ARTIFACT
    if data is None and (cache := cache_of_user()):
        key = _key(runtime, module)
        data, where = cache.read(key), str(cache.entry(key))
    if data is None:
        return _timed(runtime, module, lambda: _through_cache(runtime, module))
    found = LazyExecutable(data, lambda: _timed(runtime, module, lambda: _loaded(runtime, module, data, where)))
    if not runtime.loads_lazily or env.DUMP_TO.get():
        found.loaded()
    return found


def _timed(runtime: Runtime, module: SavedModule, make: Callable[[], tuple[Executable, str]]) -> Executable:
    began = time.monotonic()
    executable, origin = make()
    line = f"{module.name}-{_key(runtime, module)[:12]}: {origin} in {time.monotonic() - began:.2f} s"
    _LOG.info(line)
    if env.DUMP_TO.get():
        _dump(Path(env.DUMP_TO.get()).expanduser(), runtime, module, executable, line)
    return executable


def _key(runtime: Runtime, module: SavedModule) -> str:
    facts = json.dumps(dict(runtime.fingerprint), sort_keys=True)
    return hashlib.sha256(f"{module.identity} {facts}".encode()).hexdigest()


def _loaded(runtime: Runtime, module: SavedModule, data: bytes, where: str) -> tuple[Executable, str]:
    """Load an executable, or get another one if that fails."""
    if executable := _load(runtime, module, data, where):
        return executable, f"loaded from {ARTIFACT if where == ARTIFACT else 'the cache'}"
    return _through_cache(runtime, module, data)


def _load(runtime: Runtime, module: SavedModule, data: bytes, where: str) -> Executable | None:
    try:
        return runtime.load(data, module.message())
    except EngineError as error:
        warn_once(f"cannot load the executable of {module.name} from {where}, compiling it again: {error}")
        return None


def _through_cache(runtime: Runtime, module: SavedModule, unusable: bytes | None = None) -> tuple[Executable, str]:
    """Compile a program, or load it if another process has compiled it meanwhile. `unusable` cannot be loaded."""
    cache, key = cache_of_user(), _key(runtime, module)
    if cache is None:
        return runtime.compile(module.message()), "compiled"
    with cache.alone(key, runtime.patience):
        data = cache.read(key)
        if data not in (None, unusable) and (executable := _load(runtime, module, data, str(cache.entry(key)))):
            return executable, "loaded from the cache"
        executable = runtime.compile(module.message())
        cache.write(key, executable.serialize)
    return executable, "compiled"


def cache_of_user(suffix: str = ".bin") -> Cache | None:
    """Return the cache that the environment selects, or None if it is off or cannot be trusted."""
    directory = cache_directory()
    return Cache(directory, suffix) if directory else None


@dataclass(frozen=True)
class Cache:
    """Executables, or modules, in a trusted directory."""

    directory: Path
    suffix: str = ".bin"

    def entry(self, key: str) -> Path:
        return self.directory / f"{key}{self.suffix}"

    def read(self, key: str) -> bytes | None:
        """Return what is cached, or None if it is missing or damaged."""
        path = self.entry(key)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            warn_once(f"cannot read {path}, making it again: {error}")
            return None
        start = len(MAGIC) + 32
        data = content[start:]
        if content[:start] == MAGIC + hashlib.sha256(data).digest():
            return data
        warn_once(f"{path} is truncated or damaged, making it again")
        return None

    def write(self, key: str, serialize: Callable[[], bytes]) -> None:
        try:
            data = serialize()
            files.replace(self.entry(key), MAGIC + hashlib.sha256(data).digest() + data, mode=0o600)
        except (OSError, EngineError) as error:
            reason = getattr(error, "strerror", None) or error  # without file names, so that this warns once
            warn_once(f"compiled programs are not cached in {self.directory}: {reason}")

    @contextmanager
    def alone(self, key: str, patience: float) -> Iterator[None]:
        """Hold the lock of an entry, so that only one process compiles it. Stops waiting after `patience` seconds."""
        lock = self._lock(key, patience)
        try:
            yield
        finally:
            if lock is not None:
                os.close(lock)  # the lock file stays: another process may hold it

    def _lock(self, key: str, patience: float) -> int | None:
        import fcntl

        path = self.directory / f"{key}.lock"
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            warn_once(f"cannot lock {path}; another process may compile the same program: {error}")
            return None
        until = time.monotonic() + patience
        while time.monotonic() < until:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return lock
            except BlockingIOError:
                time.sleep(0.05)
            except OSError as error:
                warn_once(f"no locks in {self.directory}; another process may compile the same program: {error}")
                return lock
        warn_once(f"another process has locked {path} for {patience:.0f} s, no longer waiting for it")
        return lock


@dataclass(frozen=True)
class WrittenModules:
    """Modules of one model that were written before, by `artifact_key`. Reading one takes a hundredth of the time.

    `model` stands for all else that determines them.
    """

    cache: Cache
    model: str

    def read(self, entry: str) -> SavedModule | None:
        """Return a module, or None if it is missing or damaged."""
        data = self.cache.read(self._key(entry))
        if data is None:
            return None
        named, _, packed = data.partition(b"\n")
        try:
            found, name = named.decode().split(" ", 1)
            return SavedModule(name, found, zlib.decompress(packed))
        except (ValueError, zlib.error) as error:
            warn_once(f"{self.cache.entry(self._key(entry))} is no module, writing it again: {error}")
            return None

    def write(self, entry: str, module: SavedModule) -> None:
        named = f"{module.identity} {module.name}\n".encode()
        self.cache.write(self._key(entry), lambda: named + zlib.compress(module.data, 1))

    def _key(self, entry: str) -> str:
        return hashlib.sha256(f"{self.model} {entry}".encode()).hexdigest()


def _dump(directory: Path, runtime: Runtime, module: SavedModule, executable: Executable, line: str) -> None:
    """Write a program to `directory`: HLO as protobuf and text, the compiled program, and what it depends on."""
    name = re.sub(r"[^-.\w]", "_", line.partition(":")[0])
    shown = {
        "hlo.pb": module.data,
        "hlo.txt": runtime.module_text(module.message()).encode(),
        "compiled.txt": executable.text().encode(),
        "flags.json": json.dumps(dict(runtime.fingerprint), indent=2).encode(),
        **executable.files(),
    }
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for kind, content in shown.items():
            files.replace(directory / f"{name}.{kind}", content)
        with open(directory / "log.txt", "a") as log:
            log.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {line}\n")
    except OSError as error:
        warn_once(f"{env.DUMP_TO.name}: cannot write programs: {error}")
