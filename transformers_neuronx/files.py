"""Files that are there whole or not at all: what is written to the disk, exchanged, and read with suspicion.

It does not know what is in them.
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
ADVICE = {  # where nothing can be written, by the system's reason
    errno.ENOSPC: f"make room there, or {ELSEWHERE}",
    errno.EFBIG: f"allow larger files (ulimit -f), or {ELSEWHERE}",
    errno.EDQUOT: f"make room in this user's quota, or {ELSEWHERE}",
    errno.EIO: f"the disk may be failing: {ELSEWHERE}",
}


@contextmanager
def explain(wrong: str, advice: str = AGAIN) -> Iterator[None]:
    """Whatever a library raises becomes a CheckpointError; libraries change their exceptions between versions."""
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
        raise CheckpointError(f"{path}: wanted a regular file{why and ', ' + why}, found {kind(path)}; {AGAIN}")
    if not os.access(path, os.R_OK):
        raise CheckpointError(f"{path}: this user may not read it; change its permissions")
    return path


def want_writable(path: Path, directory: bool = False) -> Path:
    """Raise ConfigError, before the work is done, where a file, or a `directory`, cannot be written at the end."""
    what = "a directory" if directory else "a file"
    if os.path.lexists(path) and os.path.isdir(path) != directory:
        raise ConfigError(f"{path}: wanted to write {what}, found {kind(path)}; choose another name")
    place = next(each for each in (path, *path.parents) if each.exists())
    if place != path and not place.is_dir():
        raise ConfigError(f"{path}: wanted to write {what}, but {place} is {kind(place)}; choose another place")
    if not os.access(place, os.W_OK):
        raise ConfigError(f"{path}: wanted to write {what}, but {place} may not be written to; choose another place")
    return path


def is_plain(name: str) -> bool:
    """Whether it names a file beside the one that mentions it, and is never a path out of the directory."""
    return os.path.basename(name) == name and name.isprintable() and name not in ("", ".", "..")


def read_json(path: Path, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> dict[str, Any]:
    """The object in a file. `pairs` makes each object of its names and values, `unique` for instance."""
    want_file(path)
    with explain(f"{path}: not valid JSON"):
        content = json.loads(path.read_bytes(), object_pairs_hook=pairs)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: wanted a JSON object, got {type(content).__name__}; {AGAIN}")
    return content


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is there twice")
    return dict(pairs)


@contextmanager
def saving(path: Path, what: str, kinds: type[Exception] = OSError) -> Iterator[None]:
    """An error of the disk becomes a StorageError that names the path, `what` was to be written, and what to do.

    `kinds` are the errors of whoever writes.
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
    """Bring a file, or the list of a directory's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write(path: Path, data: bytes, mode: int = 0o666) -> None:
    """A new file, on the disk when this returns."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace(path: Path, data: bytes, mode: int = 0o666) -> None:
    """As `write`, in place of a file that is there: a reader sees the one or the other, after a crash as well."""
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.tmp-", dir=path.parent) as stage:
        write(Path(stage) / path.name, data, mode)
        os.replace(Path(stage) / path.name, path)
    fsync(path.parent)


def save(path: Path, data: bytes, what: str) -> None:
    """Write a file where a user wants it, in place of one that is there. StorageError where that cannot be."""
    with saving(path, what):
        if path.exists() and not path.is_file():  # a pipe or a device keeps its place
            path.write_bytes(data)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace(path.resolve(), data)


def append(file: FileIO, data: bytes) -> None:
    """Write all of it at the end of a file and bring it to the disk, or leave the file as it was."""
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
    """Have an open file alone until it is closed, or its process ends, however it does.

    BlockingIOError where another process has it; another OSError where the system or the file's place has no locks.
    """
    try:
        import fcntl
    except ImportError as error:  # on Windows
        raise OSError(errno.ENOTSUP, "no locks on this system") from error
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def staging(directory: Path, label: str) -> Iterator[Path]:
    """A temporary directory inside `directory`, which is made if need be, and unmade if the body fails.

    StorageError, which says that the `label` cannot be written, where the disk is why it fails.
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
    """Move everything staged into `directory`, what it replaces and what is `obsolete` aside, and then delete that.

    The file `last` says what belongs together: it goes first and comes last, so that a process killed meanwhile leaves
    none. When interrupted, put all of it back.
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
