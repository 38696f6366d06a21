"""GGUF files: their metadata and their table of tensors, checked before a tensor is used.

This file does not know what a tensor means. A number in a file is compared with the file's size before anything is
allocated for it.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from transformers_neuronx.errors import CheckpointError
from transformers_neuronx.support.files import AGAIN, explain, want_file

MAGIC, VERSIONS = b"GGUF", (2, 3)
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
LEAST_VALUE, LEAST_TENSOR = 13, 32  # bytes of a key with its value, and of an entry of the table
MOST_NAME, MOST_DIMENSIONS = 65535, 4
PART = re.compile(r"(?P<name>.*)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.S)


class Kind(NamedTuple):
    """A ggml type: its name, and how many numbers take how many bytes."""

    name: str
    numbers: int
    size: int


KINDS = {
    0: Kind("F32", 1, 4),
    1: Kind("F16", 1, 2),
    2: Kind("Q4_0", 32, 18),
    3: Kind("Q4_1", 32, 20),
    6: Kind("Q5_0", 32, 22),
    7: Kind("Q5_1", 32, 24),
    8: Kind("Q8_0", 32, 34),
    10: Kind("Q2_K", 256, 84),
    11: Kind("Q3_K", 256, 110),
    12: Kind("Q4_K", 256, 144),
    13: Kind("Q5_K", 256, 176),
    14: Kind("Q6_K", 256, 210),
    30: Kind("BF16", 1, 2),
    39: Kind("MXFP4", 32, 17),
}
_UNREAD = (
    "9 Q8_1, 15 Q8_K, 16 IQ2_XXS, 17 IQ2_XS, 18 IQ3_XXS, 19 IQ1_S, 20 IQ4_NL, 21 IQ3_S, 22 IQ2_S, 23 IQ4_XS, 24 I8, "
    "25 I16, 26 I32, 27 I64, 28 F64, 29 IQ1_M, 34 TQ1_0, 35 TQ2_0, 40 NVFP4, 41 Q1_0"
)
UNREAD_KINDS = {int(number): name for number, name in map(str.split, _UNREAD.split(","))}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file: its type, its sizes, with those of rows last, and where its bytes are."""

    path: Path
    name: str
    kind: Kind
    shape: tuple[int, ...]
    start: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """Its sizes in bytes: `shape`, with the bytes of a row last."""
        return (*self.shape[:-1], self.shape[-1] // self.kind.numbers * self.kind.size)

    @property
    def end(self) -> int:
        return self.start + prod(self.sizes)

    def rows(self) -> torch.Tensor:
        """Map its bytes, u8 of `sizes`. They are read from the disk on access, and writes never reach the file."""
        with explain(f"{self.path}: cannot map {self.name!r}"):
            return torch.from_numpy(np.memmap(self.path, np.uint8, "c", self.start, self.sizes))

    def part(self, number: int) -> StoredTensor:
        """Return one of the tensors that are stacked in it."""
        return replace(self, shape=self.shape[1:], start=self.start + number * prod(self.sizes[1:]))


@dataclass(frozen=True)
class Elements:
    """An array of the metadata: how many values it has, their type, and where they are. `read` reads them."""

    path: Path
    count: int
    kind: int
    start: int

    def read(self) -> list[Any]:
        with _reader(self.path, self.start) as reader:
            return [reader.value(self.kind, "an array of the metadata") for _ in range(self.count)]

    def find(self, texts: Collection[str]) -> list[int]:
        """Return the numbers of those that are one of these texts, without making texts of the others."""
        wanted, found = {text.encode() for text in texts}, []
        lengths, at = {len(text) for text in wanted}, self.start
        with _reader(self.path, at) as reader:
            data, length = reader.data, struct.Struct("<Q").unpack_from
            for number in range(self.count if self.kind == STRING else 0):
                [size] = length(data, at)
                if size in lengths and data[at + 8 : at + 8 + size] in wanted:
                    found.append(number)
                at += 8 + size
        return found


@dataclass(frozen=True)
class GgufFile:
    """The content of a file, or of all files of a split model. Arrays of the metadata are `Elements`."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]


def begins_as_gguf(path: Path) -> bool:
    with suppress(OSError), open(path, "rb") as file:
        return file.read(len(MAGIC)) == MAGIC
    return False


def open_files(path: Path) -> GgufFile:
    """Open a GGUF file, and those that belong to it if its model is split. Reads headers only.

    CheckpointError if a file is missing, damaged, contradicts itself or another one, or has a type that is not read.
    """
    file = _open(path)
    count = file.metadata.get("split.count", 1)
    if count in (0, 1):
        return file
    match = PART.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        wanted = f"a name that ends with -00001-of-{count:05}.gguf" if isinstance(count, int) else "one number"
        raise _refused(path, f"split.count in the metadata is {str(count)[:60]}, expected {wanted}")
    names = [f"{match['name']}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]
    parts = [_open(path.with_name(name), f"which belongs to {path.name}") for name in names]
    for number, part in enumerate(parts):
        said = [part.metadata.get(f"split.{key}") for key in ("no", "count")]
        if said != [number, count]:
            raise _refused(part.path, f"the metadata has split.no and split.count {said}, expected {[number, count]}")
    tensors = {name: tensor for part in parts for name, tensor in part.tensors.items()}
    total, listed = sum(len(part.tensors) for part in parts), file.metadata.get("split.tensors.count", len(tensors))
    if not total == len(tensors) == listed:
        found = f"{total}, of them {len(tensors)} with different names"
        raise _refused(path, f"expected {str(listed)[:60]} tensors in the {count} files, got {found}")
    return GgufFile(path, parts[0].metadata, tensors)


def _refused(path: Path, wrong: str, advice: str = AGAIN) -> CheckpointError:
    return CheckpointError(f"{path}: {wrong}; {advice}")


def _open(path: Path, why: str = "") -> GgufFile:
    """Read the header of one file."""
    want_file(path, why)
    with _reader(path, len(MAGIC)) as reader:
        if (magic := bytes(reader.data[: len(MAGIC)])) != MAGIC:
            raise _refused(path, f"not a GGUF file: it begins with {magic!r}, not with {MAGIC!r}")
        version = reader.number("I", "the version")
        if struct.unpack(">I", struct.pack("<I", version))[0] in VERSIONS:
            raise _refused(path, "the file is big-endian, which cannot be read", "convert it with gguf-convert-endian")
        if version not in VERSIONS:
            raise _refused(path, f"the file has version {version} of GGUF: supported are 2 and 3", "convert it again")
        tensors, values = (reader.number("Q", "the number of tensors and values") for _ in range(2))
        room = len(reader.data) - reader.at
        if tensors * LEAST_TENSOR + values * LEAST_VALUE > room:
            raise _refused(path, f"{tensors} tensors and {values} values do not fit into the file of {room} more bytes")
        metadata = _unique(path, "the key", [reader.pair() for _ in range(values)])
        entries = _unique(path, "the tensor", [reader.entry() for _ in range(tensors)])
        return GgufFile(path, metadata, _placed(reader, metadata.get("general.alignment", 32), entries))


def _unique(path: Path, what: str, pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise _refused(path, f"{what} {name!r} occurs twice")
        found[name] = value
    return found


def _placed(reader: _Reader, alignment: Any, entries: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Return the tensors of a table, which ends where the reader is."""
    if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
        raise _refused(reader.path, f"general.alignment must be a power of two from 8, got {str(alignment)[:60]}")
    begin, size = -(-reader.at // alignment) * alignment, len(reader.data)
    tensors = {}
    for name, (shape, number, offset) in entries.items():
        if number not in KINDS:
            listed, known = ", ".join(kind.name for kind in KINDS.values()), UNREAD_KINDS.get(number, number)
            advice = "take a file with other types, or convert it"
            raise _refused(reader.path, f"{name!r} has the type {known}: supported are {listed}", advice)
        tensor = StoredTensor(reader.path, name, KINDS[number], shape, begin + offset)
        if shape[-1] % tensor.kind.numbers:
            wanted = f"multiples of {tensor.kind.numbers}, the block of {tensor.kind.name}"
            raise _refused(reader.path, f"{name!r} {list(shape)} has rows of {shape[-1]} numbers, expected {wanted}")
        if offset % alignment or tensor.end > size:
            where = f"from {tensor.start} to {tensor.end} of {size} bytes, {offset} after {begin}"
            raise _refused(reader.path, f"{name!r} must lie in the file, aligned to {alignment}, but it is {where}")
        tensors[name] = tensor
    for one, other in pairwise(sorted(tensors.values(), key=lambda tensor: tensor.start)):
        if other.start < one.end:
            where = f"begins at {other.start}, before {one.name!r} ends at {one.end}"
            raise _refused(reader.path, f"{other.name!r} {where}")
    return tensors


@contextmanager
def _reader(path: Path, at: int) -> Iterator[_Reader]:
    with (
        explain(f"{path}: not a whole GGUF file"),
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        yield _Reader(path, data, at)


class _Reader:
    """Reads the parts of a header one after the other. None is read beyond the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap, at: int) -> None:
        self.path, self.data, self.at = path, data, at

    def skip(self, count: int, what: str) -> int:
        """Go on behind `count` bytes. Returns where they begin."""
        start, self.at = self.at, self.at + count
        if self.at > len(self.data):
            wrong = f"{what} would end at {self.at}, behind the end of the file at {len(self.data)}"
            raise _refused(self.path, wrong)
        return start

    def number(self, code: str, what: str) -> Any:
        return struct.unpack_from(f"<{code}", self.data, self.skip(struct.calcsize(f"<{code}"), what))[0]

    def text(self, what: str, most: int | None = None) -> str:
        count = self.number("Q", what)
        if most is not None and count > most:
            raise _refused(self.path, f"{what} has {count} bytes, expected at most {most}")
        start = self.skip(count, what)
        try:
            return self.data[start : self.at].decode()
        except UnicodeDecodeError as error:
            raise _refused(self.path, f"{what}, at {start}, is not UTF-8") from error

    def pair(self) -> tuple[str, Any]:
        """Read a key and its value."""
        key = self.text("a key of the metadata", MOST_NAME)
        what = f"the value of {key!r}"
        return key, self.value(self.number("I", what), what)

    def value(self, kind: int, what: str) -> Any:
        if kind == STRING:
            return self.text(what)
        if kind in SCALARS:
            return self.number(SCALARS[kind], what)
        if kind != ARRAY:
            raise _refused(self.path, f"{what} has the type {kind}, which GGUF does not have")
        kind, count, start = self.number("I", what), self.number("Q", what), self.at
        if kind == STRING:
            self._skip_texts(count, what)
        elif kind in SCALARS:
            self.skip(count * struct.calcsize(f"<{SCALARS[kind]}"), what)
        else:
            raise _refused(self.path, f"{what} is an array of the type {kind}, expected numbers or text")
        return Elements(self.path, count, kind, start)

    def entry(self) -> tuple[str, tuple[tuple[int, ...], int, int]]:
        """Read an entry of the table: a name, with its sizes, the number of its type, and its offset."""
        name = self.text("the name of a tensor", MOST_NAME)
        what = f"the table's entry {name!r}"
        dimensions = self.number("I", what)
        if not 1 <= dimensions <= MOST_DIMENSIONS:
            raise _refused(self.path, f"{name!r} has {dimensions} dimensions, expected 1 to {MOST_DIMENSIONS}")
        shape = tuple(self.number("Q", what) for _ in range(dimensions))[::-1]
        if not all(shape):
            raise _refused(self.path, f"{name!r} has sizes {list(shape)}, expected positive ones")
        return name, (shape, self.number("I", what), self.number("Q", what))

    def _skip_texts(self, count: int, what: str) -> None:
        """Skip an array of texts: a vocabulary has hundreds of thousands."""
        data, at, last, length = self.data, self.at, len(self.data) - 8, struct.Struct("<Q").unpack_from
        for _ in range(count):
            if at > last:
                raise _refused(self.path, f"{what}, {count} texts, goes on behind the end of the file")
            at += 8 + length(data, at)[0]
        self.skip(at - self.at, what)
