"""The manifest of an artifact: the form of `manifest.json`, and the checksums that it has of files and of itself.

It knows names and sizes. What programs and weights are it does not know.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers_neuronx import files
from transformers_neuronx.errors import CheckpointError

FORMAT = 3
MANIFEST, CONFIG = "manifest.json", "config.json"
Tensors = dict[str, list[str]]  # of a file of weights: each tensor, and the weights that it is


def as_json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, indent=2, default=str).encode()


def sealed(manifest: Mapping[str, Any]) -> bytes:
    """The file, with a checksum of the manifest itself."""
    return as_json({**manifest, "sha256": _digest(manifest)})


def _digest(manifest: Mapping[str, Any]) -> str:
    """Of all but itself, however the file is laid out."""
    told = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()


def facts_of(path: Path) -> dict[str, Any]:
    """Size and checksum: of weights, which are gigabytes, one that is several times as fast. Both are against damage,
    not against whoever can write the manifest as well.
    """
    kind = "crc32" if path.name.startswith("weights-") else "sha256"
    return dict(size=path.stat().st_size) | {kind: _CHECKSUMS[kind](path)}


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _crc32_of(path: Path) -> str:
    checksum, buffer = 0, memoryview(bytearray(2**18))
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(buffer):
            checksum = zlib.crc32(buffer[:size], checksum)
    return f"{checksum:08x}"


_CHECKSUMS = dict(sha256=sha256_of, crc32=_crc32_of)


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest in `directory`, whose files are all there, in the sizes that it says.

    CheckpointError names the file that is missing, of another size, or is not what a manifest is.
    """
    path = directory / MANIFEST
    manifest = files.read_json(path, files.unique)
    with files.explain(f"{path}: not the manifest of an artifact"):
        _check(manifest)
    for name, facts in manifest["files"].items():
        with files.explain(f"{path}: no file can be called {name!r}"):
            size = files.want_file(directory / name, f"which {MANIFEST} lists").stat().st_size
        if size != facts["size"]:
            raise CheckpointError(f"{directory / name}: {size} bytes in place of {facts['size']}; {files.AGAIN}")
    return manifest


def _check(manifest: dict[str, Any]) -> None:
    """Raise ValueError unless it has the form of a manifest, and names no file that is not listed, or elsewhere."""

    def want(holds: object, text: str) -> None:
        if not holds:
            raise ValueError(text)

    want(manifest.get("format") == FORMAT, f"format {manifest.get('format')!r}, and this version reads {FORMAT}")
    want(manifest.get("sha256") == _digest(manifest), "damaged: its checksum differs")
    want(isinstance(manifest.get("family"), str), "no name of a family")
    want(isinstance(manifest.get("code"), str), "no digest of the code")
    for name in ("config", "options", "runtime", "keys", "programs", "weights", "files"):
        want(isinstance(manifest.get(name), dict), f"wanted an object as {name!r}")
    listed, mentioned = manifest["files"], [CONFIG]
    for name, facts in listed.items():
        want(files.is_plain(name), f"{name!r} is not a plain file name")
        want(isinstance(facts, dict) and "size" in facts, f"wanted size and checksum of {name!r}")
    for program in manifest["programs"].values():
        want(isinstance(program, dict) and program.keys() == {"hlo", "executable"}, "wanted two files of each program")
        mentioned += program.values()
    want(all(isinstance(identity, str) for identity in manifest["keys"].values()), "no program of a key")
    for file, tensors in manifest["weights"].items():
        want(isinstance(tensors, dict), f"wanted the tensors of {file!r}")
        for names in tensors.values():
            want(isinstance(names, list) and all(isinstance(name, str) for name in names), "wanted names of weights")
        mentioned.append(file)
    marks = manifest.get("origin", {})  # which earlier versions did not write
    want(isinstance(marks, dict) and all(isinstance(mark, str) for mark in marks.values()), "wanted marks as 'origin'")
    for file in mentioned:
        want(file in listed, f"{file!r} is not among its files")
