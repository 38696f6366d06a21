"""Get an executable for a module: from an artifact, from the cache on disk, or from the compiler.

The cache is a directory of executables. Each is named by a digest of its module and of everything else it depends on.
Cached code is executed, so the directory must belong to the user. A problem with the cache never stops a program: it is
logged once, and the program is compiled. With NEURONX_DUMP_TO, every program is also written to that directory.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from transformers_neuronx import env
from transformers_neuronx.errors import ConfigError, EngineError
from transformers_neuronx.pyhlo import HloModuleProto
from transformers_neuronx.runtimes.base import Executable, Runtime
from transformers_neuronx.support import files

_LOG = logging.getLogger(__name__)

MAGIC = b"transformers_neuronx executable 1\n"  # a cache entry: this, the SHA-256 of the rest, an executable


class ArtifactSource(NamedTuple):
    """The programs of an artifact: modules by `artifact_key`, executables by the `identity` of their module."""

    module: Callable[[str], HloModuleProto | None]
    executable: Callable[[str], bytes | None]


def build(runtime: Runtime, module: HloModuleProto, identity: str, source: ArtifactSource | None = None) -> Executable:
    """Return an executable of `module`, whose `identity` is given. Raises EngineError with the compiler's message."""
    began = time.monotonic()
    key = _key(runtime, identity)
    data = source.executable(identity) if source else None
    executable, origin = _loaded(runtime, module, data, "a saved artifact"), "loaded from an artifact"
    if executable is None:
        executable, origin = _through_cache(runtime, module, key)
    line = f"{module.name}-{key[:12]}: {origin} in {time.monotonic() - began:.2f} s"
    _LOG.info(line)
    if env.DUMP_TO.get():
        _dump(Path(env.DUMP_TO.get()).expanduser(), runtime, module, executable, line)
    return executable


def _key(runtime: Runtime, identity: str) -> str:
    facts = json.dumps(dict(runtime.fingerprint), sort_keys=True)
    return hashlib.sha256(f"{identity} {facts}".encode()).hexdigest()


def _loaded(runtime: Runtime, module: HloModuleProto, data: bytes | None, origin: str) -> Executable | None:
    if data is None:
        return None
    try:
        return runtime.load(data, module)
    except EngineError as error:
        warn_once(f"cannot load the executable of {module.name} from {origin}, compiling it again: {error}")
        return None


def _through_cache(runtime: Runtime, module: HloModuleProto, key: str) -> tuple[Executable, str]:
    cache = cache_of_user()
    if cache is None:
        return runtime.compile(module), "compiled"
    if executable := _loaded(runtime, module, cache.read(key), str(cache.entry(key))):
        return executable, "loaded from the cache"
    with cache.alone(key, runtime.patience):
        # Another process may have compiled it while this one waited for the lock.
        if executable := _loaded(runtime, module, cache.read(key), str(cache.entry(key))):
            return executable, "loaded from the cache"
        executable = runtime.compile(module)
        cache.write(key, executable)
    return executable, "compiled"


@functools.cache
def warn_once(text: str) -> None:
    _LOG.warning(text)


def cache_of_user() -> Cache | None:
    """Return the cache that the environment selects, or None if it is off or cannot be trusted."""
    if (switch := env.CACHE.get()) not in ("on", "off"):
        raise ConfigError(f"{env.CACHE.name} must be on or off, got {switch!r}")
    if switch == "off" or os.name != "posix":  # other systems lack these locks and owners
        return None
    directory = os.path.expanduser(env.CACHE_DIR.get() or os.path.join(env.CACHE_HOME.get(), "transformers_neuronx"))
    if directory.startswith("~"):
        warn_once(f"no home directory to cache compiled programs in: set {env.CACHE_DIR.name}, or {env.CACHE.name}=off")
        return None
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        status = os.stat(directory)
    except OSError as error:
        warn_once(f"compiled programs are not cached: {error}")
        return None
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        warn_once(
            f"compiled programs are not cached in {directory}: cached code is executed, but the directory belongs to "
            f"another user, or others can write to it (mode {stat.S_IMODE(status.st_mode):o}); run chmod 700 on it, or "
            f"set {env.CACHE_DIR.name} to another directory"
        )
        return None
    return Cache(Path(directory))


@dataclass(frozen=True)
class Cache:
    """Executables in a trusted directory."""

    directory: Path

    def entry(self, key: str) -> Path:
        return self.directory / f"{key}.bin"

    def read(self, key: str) -> bytes | None:
        """Return the executable, or None if it is missing or damaged."""
        path = self.entry(key)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            warn_once(f"cannot read {path}, compiling it again: {error}")
            return None
        start = len(MAGIC) + 32
        data = content[start:]
        if content[:start] == MAGIC + hashlib.sha256(data).digest():
            return data
        warn_once(f"{path} is truncated or damaged, compiling it again")
        return None

    def write(self, key: str, executable: Executable) -> None:
        try:
            data = executable.serialize()
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


def _dump(directory: Path, runtime: Runtime, module: HloModuleProto, executable: Executable, line: str) -> None:
    """Write a program to `directory`: HLO as protobuf and text, the compiled program, and what it depends on."""
    name = re.sub(r"[^-.\w]", "_", line.partition(":")[0])
    shown = {
        "hlo.pb": module.SerializeToString(deterministic=True),
        "hlo.txt": runtime.module_text(module).encode(),
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
