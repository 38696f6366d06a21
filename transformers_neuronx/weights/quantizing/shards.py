"""Writes a checkpoint: safetensors in shards, with an index if there are several, and the files that go with them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from transformers_neuronx.config.multimodal import text_half
from transformers_neuronx.errors import ConfigError
from transformers_neuronx.support import files
from transformers_neuronx.weights.directories import GENERATION_CONFIG, TOKENIZER_FILES, PathOrName
from transformers_neuronx.weights.formats import SINGLE

LIMIT = 2 * 10**9  # bytes of a shard, which are held in memory until it is written
CONFIG = "config.json"


class Shards:
    """The weights of a checkpoint that is being written to a directory."""

    def __init__(self, directory: Path, limit: int) -> None:
        self.bytes = 0
        self._directory, self._limit = directory, limit
        self._held: dict[str, torch.Tensor] = {}
        self._written: list[list[str]] = []  # names of the tensors of each shard

    def add(self, tensors: dict[str, torch.Tensor]) -> None:
        size = sum(tensor.nbytes for tensor in tensors.values())
        if self._held and sum(tensor.nbytes for tensor in self._held.values()) + size > self._limit:
            self._write()
        # tied tensors of a pickle may share memory, which safetensors refuses
        taken = {tensor.untyped_storage().data_ptr() for tensor in self._held.values()}
        for name, tensor in tensors.items():
            shared = tensor.untyped_storage().data_ptr() in taken
            self._held[name] = tensor.clone() if shared else tensor.contiguous()
        self.bytes += size

    def end(self) -> None:
        """Write what is left, and the index if there are several shards."""
        self._write()
        count = len(self._written)
        if count == 1:
            self._part(1).rename(self._directory / SINGLE)
            return
        place: dict[str, str] = {}
        for number, names in enumerate(self._written, 1):
            file = f"model-{number:05}-of-{count:05}.safetensors"
            self._part(number).rename(self._directory / file)
            place |= dict.fromkeys(names, file)
        index = dict(metadata=dict(total_size=self.bytes), weight_map=dict(sorted(place.items())))
        files.write(self._directory / f"{SINGLE}.index.json", json.dumps(index, indent=2).encode())

    def _write(self) -> None:
        self._written.append(sorted(self._held))
        data = safetensors.torch.save(self._held, metadata=dict(format="pt"))
        files.write(self._part(len(self._written)), data)
        self._held = {}

    def _part(self, number: int) -> Path:
        return self._directory / f"part-{number}"


def want_place(directory: PathOrName) -> Path:
    """Return the path of a new directory. Raises ConfigError if there is anything in it, or it cannot be written."""
    path = files.want_writable(Path(directory).expanduser(), directory=True)
    if path.exists() and any(path.iterdir()):
        raise ConfigError(f"{path}: expected a new or an empty directory, found files in it; choose another one")
    return path


def copy_beside(source: Path, tokenizer: Path, stage: Path, quantization: dict[str, Any]) -> None:
    """Write the configuration with how weights are stored, and copy that of the generation, and the tokenizer."""
    config = text_half(files.read_json(source / CONFIG)) | dict(quantization_config=quantization)
    files.write(stage / CONFIG, json.dumps(config, indent=2).encode())
    for file in {*_matching(source, [GENERATION_CONFIG]), *_matching(tokenizer, TOKENIZER_FILES)}:
        with files.explain(f"{file}: cannot be read"):
            data = file.read_bytes()
        files.write(stage / file.name, data)


def _matching(directory: Path, patterns: Iterable[str]) -> set[Path]:
    return {file for pattern in patterns for file in directory.glob(pattern) if file.is_file()}
