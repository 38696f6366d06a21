"""Formats of checkpoint files: each is opened as functions that read one tensor.

This file refuses damaged, contradictory or executable files before a tensor is used. It does not know what a tensor
means.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import pickle
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import safe_open

from transformers_neuronx.errors import CheckpointError
from transformers_neuronx.support.files import AGAIN, explain, is_plain, read_json, unique, want_file
from transformers_neuronx.weights.other_formats import EMPTY, random_tensor

_LOG = logging.getLogger(__name__)

Readers: TypeAlias = dict[str, Callable[[str], torch.Tensor]]  # tensor name -> function that reads it, given that name

# Types of safetensors that are read here, and those of torch.
TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip

SINGLE = "model.safetensors"
SPLIT_DIRECTORY = "pytorch_model.bin"
SPLIT_LISTING = "key_to_filename.json"


def format_in(directory: Path) -> str:
    # lexists: a dangling link is a broken checkpoint to report, not a reason to load the next format
    return next((file for file in FORMATS if os.path.lexists(directory / file)), "")


def open_safetensors(path: Path, to_keep: bool = False) -> Readers:
    """Return the readers of a file's tensors; those `to_keep` share one mapping. CheckpointError if it is not whole."""
    want_file(path)
    # checks the whole header: its length and JSON, offsets without holes or overlaps, and the length of the file
    with explain(f"{path}: not a whole safetensors file"):
        file: Any = safe_open(path, framework="pt")
        if to_keep:
            return dict.fromkeys(file.keys(), file.get_tensor)
        with path.open("rb") as content:
            size = int.from_bytes(content.read(8), "little")
            header = json.loads(content.read(size))
        return dict.fromkeys(file.keys(), lambda name: _mapped(path, 8 + size, name, header[name]))


def _mapped(path: Path, begins: int, name: str, entry: Mapping[str, Any]) -> torch.Tensor:
    """Map a tensor of a safetensors file, so that pages of the file are not held longer than the tensor.

    Opening the file again would read the whole header, for each of what may be tens of thousands of tensors.
    """
    dtype, shape, (first, last) = TYPES.get(entry["dtype"]), entry["shape"], entry["data_offsets"]
    if dtype is None or first == last or (begins + first) % dtype.itemsize:
        with safe_open(path, framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
        return tensor
    before = (begins + first) % mmap.ALLOCATIONGRANULARITY
    with path.open("rb") as content:
        memory = mmap.mmap(
            content.fileno(), before + last - first, access=mmap.ACCESS_COPY, offset=begins + first - before
        )
    return torch.frombuffer(memory, dtype=dtype, offset=before).reshape(shape)


def open_bin(path: Path) -> Readers:
    want_file(path, f"or a directory with {SPLIT_LISTING}")
    content = _torch_load(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a state dict, got {type(content).__name__}; save model.state_dict()")
    tensors = {name: _tensor(path, name, value) for name, value in content.items()}
    return dict.fromkeys(tensors, tensors.__getitem__)


def _open_split(path: Path) -> Readers:
    files: dict[str, torch.Tensor] = {}  # tied tensors may share one
    tensors: dict[str, torch.Tensor] = {}
    random: Readers = {}
    for name, file in _read_listing(path).items():
        if file.endswith(EMPTY):
            random[name] = random_tensor(_listed(path, name, file))
            continue
        if file not in files:
            files[file] = _tensor(path.parent / file, name, _torch_load(_listed(path, name, file)))
        tensors[name] = files[file]
    if random:
        _LOG.warning("%s: %d tensors are random: only their sizes were saved", path.parent, len(random))
    return dict.fromkeys(tensors, tensors.__getitem__) | random


def _open_index(path: Path, open_shard: Callable[[Path], Readers]) -> Readers:
    shards: dict[str, Readers] = {}
    readers: Readers = {}
    for name, file in _read_listing(path, "weight_map").items():
        if file not in shards:
            shards[file] = open_shard(_listed(path, name, file))
        if name not in shards[file]:
            raise CheckpointError(f"{path}: {name!r} should be in {file}, which does not hold it; download both again")
        readers[name] = shards[file][name]
    return readers


FORMATS: Mapping[str, Callable[[Path], Readers]] = {
    SINGLE: open_safetensors,
    f"{SINGLE}.index.json": partial(_open_index, open_shard=open_safetensors),
    f"{SPLIT_DIRECTORY}/{SPLIT_LISTING}": _open_split,
    "pytorch_model.bin": open_bin,
    "pytorch_model.bin.index.json": partial(_open_index, open_shard=open_bin),
}


def _torch_load(path: Path) -> Any:
    want_file(path)
    with explain(f"{path}: truncated, damaged, or older than torch 1.6", "download or save it again"):
        try:
            return torch.load(path, weights_only=True, mmap=True, map_location="cpu")
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{path}: a pickle of more than plain tensors, which will not be executed; "
                "convert it to safetensors on an isolated machine"
            ) from error


def _tensor(path: Path, name: object, value: object) -> torch.Tensor:
    if not isinstance(name, str) or not isinstance(value, torch.Tensor):
        raise CheckpointError(f"{path}: expected tensors by name, got {type(value).__name__} at {name!r}; flatten it")
    return value.detach()


def _listed(listing: Path, name: str, file: str) -> Path:
    """Return the file that a listing has for a tensor: a plain name next to the listing, never a path outside it."""
    if not is_plain(file):
        raise CheckpointError(f"{listing}: {name!r} is listed in {file!r}; expected a plain name next to the listing")
    return want_file(listing.parent / file, f"which {listing.name} lists for tensor {name!r}")


def _read_listing(path: Path, key: str | None = None) -> dict[str, str]:
    """Read a map of tensor names to file names, under `key` or as the whole object."""
    content = read_json(path, unique)
    listing = content if key is None else content.get(key)
    if not isinstance(listing, dict) or not all(isinstance(file, str) for file in listing.values()):
        where = "an object" if key is None else f"{key!r} to be an object"
        raise CheckpointError(f"{path}: expected {where} from tensor name to file name; {AGAIN}")
    return listing
