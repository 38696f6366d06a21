"""Write and exchange files so that each is complete or absent, and check files before they are read.

This file does not know what the files contain.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any

from transformers_neuronx.errors import CheckpointError, ConfigError, StorageError

AGAIN = "download or save it again"
ELSEWHERE = "choose another place"
ADVICE = {  # what to do when a write fails, by error number
    errno.ENOSPC: f"make room there, or {ELSEWHERE}",
    errno.EFBIG: f"allow larger files (ulimit -f), or {ELSEWHERE}",
    errno.EDQUOT: f"make room in this user's quota, or {ELSEWHERE}",
    errno.EIO: f"the disk may be failing: {ELSEWHERE}",
}


@contextmanager
def explain(wrong: str, advice: str = AGAIN) -> Iterator[None]:
    """Turn any exception of a library into a CheckpointError. Libraries change their exceptions between versions."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise CheckpointError(f"{wrong} ({reason}); {advice}") from error


def kind(path: str | os.PathLike[str]) -> str:
    if os.path.isdir(path):
        return "a directory"
    if os.path.islink(path) and not os.path.exists(path):
        return "a dangling link"
    return "a file" if os.path.isfile(path) else "a special file" if os.path.exists(path) else "nothing"


def want_file(path: Path, why: str = "") -> Path:
    # links are followed: a hub snapshot is a directory of links into the cache's blobs
    if not os.path.isfile(path):
        raise CheckpointError(f"{path}: expected a regular file{why and ', ' + why}, found {kind(path)}; {AGAIN}")
    if not os.access(path, os.R_OK):
        raise CheckpointError(f"{path}: this user is not allowed to read it; change its permissions")
    return path


def want_writable(path: Path, directory: bool = False) -> Path:
    """Raise ConfigError before the work starts if a file, or a `directory`, cannot be written at its end."""
    what = "a directory" if directory else "a file"
    if os.path.lexists(path) and os.path.isdir(path) != directory:
        raise ConfigError(f"{path}: cannot write {what}, found {kind(path)}; choose another name")
    place = next(each for each in (path, *path.parents) if each.exists())
    if place != path and not place.is_dir():
        raise ConfigError(f"{path}: cannot write {what}, because {place} is {kind(place)}; choose another place")
    if not os.access(place, os.W_OK):
        raise ConfigError(f"{path}: cannot write {what}, because {place} is not writable; choose another place")
    return path


def is_plain(name: str) -> bool:
    """Whether `name` is a file name without a directory, so that it cannot lead out of one."""
    return os.path.basename(name) == name and name.isprintable() and name not in ("", ".", "..")


def read_json(path: Path, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> dict[str, Any]:
    """Return the JSON object in a file. `pairs` builds each object from its names and values, as `unique` does."""
    want_file(path)
    with explain(f"{path}: not valid JSON"):
        content = json.loads(path.read_bytes(), object_pairs_hook=pairs)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(content).__name__}; {AGAIN}")
    return content


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return dict(pairs)


@contextmanager
def saving(path: Path, what: str, kinds: type[Exception] = OSError) -> Iterator[None]:
    """Turn a disk error into a StorageError with the path, `what` was to be written, and what to do.

    `kinds` are the exceptions that the writer raises.
    """
    try:
        yield
    except StorageError:
        raise
    except kinds as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        number = getattr(error, "errno", None)
        advice = ADVICE.get(number or errno.ENOSPC, ELSEWHERE)
        raise StorageError(f"{path}: cannot write {what}: {reason}; {advice}", number) from error


def fsync(path: Path) -> None:
    """Flush a file, or the entries of a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write a new file and flush it to the disk."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Like `write`, but replace an existing file. A reader sees the old or the new file, even after a crash."""
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.tmp-", dir=path.parent) as stage:
        write(Path(stage) / path.name, data, mode)
        os.replace(Path(stage) / path.name, path)
    fsync(path.parent)


def save(path: Path, data: bytes, what: str) -> None:
    """Write a file to the user's path, replacing an existing one. Raises StorageError on failure."""
    with saving(path, what):
        if path.exists() and not path.is_file():  # a pipe or a device is written to, not replaced
            path.write_bytes(data)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace(path.resolve(), data)


def append(file: FileIO, data: bytes) -> None:
    """Append all of `data` to a file and flush it to the disk, or leave the file unchanged."""
    end = os.fstat(file.fileno()).st_size
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[file.write(rest) :]
        os.fsync(file.fileno())
    except BaseException:
        with suppress(OSError):
            file.truncate(end)
        raise


def lock(file: FileIO) -> None:
    """Lock an open file until it is closed or the process ends in any way.

    Raises BlockingIOError if another process has the lock, another OSError if the system or the location has no locks.
    """
    try:
        import fcntl
    except ImportError as error:  # on Windows
        raise OSError(errno.ENOTSUP, "no locks on this system") from error
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def staging(directory: Path, label: str) -> Iterator[Path]:
    """Yield a temporary directory inside `directory`, which is created if needed, and removed if the body fails.

    If the disk is the reason, raises StorageError, which says that the `label` cannot be written.
    """
    made = [path for path in (directory, *directory.parents) if not path.exists()]
    try:
        with saving(directory, f"the {label}"):
            directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=f".{label}.tmp-{os.getpid()}-", dir=directory) as stage:
                yield Path(stage)
    except BaseException:
        with suppress(OSError):
            for path in made:
                path.rmdir()
        raise


def exchange(stage: Path, directory: Path, last: str = "", obsolete: Collection[str] = ()) -> None:
    """Move all staged files into `directory`. The files that they replace, and `obsolete` ones, are then deleted.

    The file `last` lists what belongs together. The old one is moved away first, and the new one is moved in last: a
    process that is killed in between leaves none. After an interrupt or an error, the old files are put back.
    """
    names = sorted((entry.name for entry in stage.iterdir()), key=lambda name: name == last)
    replaced = directory / stage.name.replace(".tmp-", ".old-")
    replaced.mkdir()

    def aside(name: str) -> None:
        if name and os.path.lexists(directory / name):
            os.rename(directory / name, replaced / name)
            if name == last:
                fsync(directory)

    try:
        for name in (last, *obsolete):
            aside(name)
        for name in names:
            aside(name)
            if name == last:
                fsync(directory)
            os.rename(stage / name, directory / name)
        fsync(directory)
    except BaseException:
        for name in [*names, *obsolete]:
            if name in names and not os.path.lexists(stage / name):
                os.rename(directory / name, stage / name)
            if os.path.lexists(replaced / name):
                os.rename(replaced / name, directory / name)
        replaced.rmdir()
        raise
    shutil.rmtree(replaced)
