"""The manifest of an artifact: the format of `manifest.json`, with checksums of the files and of itself.

This file knows names and sizes. It does not know what programs and weights are.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers_neuronx.errors import CheckpointError
from transformers_neuronx.support import files

FORMAT = 3
MANIFEST, CONFIG = "manifest.json", "config.json"
Tensors = dict[str, list[str]]  # of a file of weights: each tensor, and the weights that share it


def as_json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, indent=2, default=str).encode()


def sealed(manifest: Mapping[str, Any]) -> bytes:
    """Return the content of the file, with a checksum of the manifest itself."""
    return as_json({**manifest, "sha256": _digest(manifest)})


def _digest(manifest: Mapping[str, Any]) -> str:
    """Return a digest of everything but the digest itself, whatever the file's formatting."""
    told = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()


def facts_of(path: Path) -> dict[str, Any]:
    """Return the size and checksum of a file. Weights are gigabytes, so theirs is one that is several times as fast.

    Checksums detect damage. They do not protect against someone who can also write the manifest.
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
    """Return the manifest in `directory`, after checking that all its files exist with the listed sizes.

    Raises CheckpointError, naming the file, if one is missing, has another size, or is not a valid manifest.
    """
    path = directory / MANIFEST
    manifest = files.read_json(path, files.unique)
    with files.explain(f"{path}: not the manifest of an artifact"):
        _check(manifest)
    for name, facts in manifest["files"].items():
        with files.explain(f"{path}: invalid file name {name!r}"):
            size = files.want_file(directory / name, f"listed in {MANIFEST}").stat().st_size
        if size != facts["size"]:
            raise CheckpointError(f"{directory / name}: expected {facts['size']} bytes, got {size}; {files.AGAIN}")
    return manifest


def _check(manifest: dict[str, Any]) -> None:
    """Raise ValueError unless the manifest is valid and refers only to listed files in its directory."""

    def want(holds: object, text: str) -> None:
        if not holds:
            raise ValueError(text)

    want(manifest.get("format") == FORMAT, f"format {manifest.get('format')!r}, but this version reads {FORMAT}")
    want(manifest.get("sha256") == _digest(manifest), "damaged: its checksum differs")
    want(isinstance(manifest.get("family"), str), "no name of a model family")
    want(isinstance(manifest.get("code"), str), "no digest of the code")
    for name in ("config", "options", "runtime", "keys", "programs", "weights", "files"):
        want(isinstance(manifest.get(name), dict), f"{name!r} must be an object")
    listed, mentioned = manifest["files"], [CONFIG]
    for name, facts in listed.items():
        want(files.is_plain(name), f"{name!r} is not a plain file name")
        want(isinstance(facts, dict) and "size" in facts, f"{name!r} must have a size and a checksum")
    for program in manifest["programs"].values():
        want(isinstance(program, dict) and program.keys() == {"hlo", "executable"}, "each program must have two files")
        mentioned += program.values()
    want(all(isinstance(identity, str) for identity in manifest["keys"].values()), "each key must name a program")
    for file, tensors in manifest["weights"].items():
        want(isinstance(tensors, dict), f"{file!r} must list its tensors")
        for names in tensors.values():
            want(isinstance(names, list) and all(isinstance(name, str) for name in names), "expected names of weights")
        mentioned.append(file)
    marks = manifest.get("origin", {})  # earlier versions did not write it
    want(isinstance(marks, dict) and all(isinstance(mark, str) for mark in marks.values()), "'origin' must hold marks")
    for file in mentioned:
        want(file in listed, f"{file!r} is not among its files")
