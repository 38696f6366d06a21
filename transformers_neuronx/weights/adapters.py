"""LoRA adapters as PEFT saves them: read, and merged into the weights of a checkpoint while these are read.

An adapter has two small matrices for each matrix that it changes, and maybe whole weights that replace others.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from transformers_neuronx.config.multimodal import text_name
from transformers_neuronx.errors import CheckpointError
from transformers_neuronx.support.files import AGAIN, explain, read_json
from transformers_neuronx.weights.checkpoint import Checkpoint, open_weights
from transformers_neuronx.weights.directories import PathOrName
from transformers_neuronx.weights.formats import Readers, open_bin, open_safetensors
from transformers_neuronx.weights.other_formats import ADAPTER_FILE

_LOG = logging.getLogger(__name__)
START = "base_model.model."  # of all names
# Ends of the names of a matrix's parts. An embedding's are applied to columns of A. The magnitudes are DoRA's.
PARTS = {
    ".lora_A.weight": "a",
    ".lora_B.weight": "b",
    ".lora_embedding_A": "a",
    ".lora_embedding_B": "b",
    ".lora_magnitude_vector": "magnitude",
    ".lora_magnitude_vector.weight": "magnitude",
}


@dataclass(frozen=True)
class Change:
    """What an adapter does to a matrix: adds `scale * b @ a`, then maybe scales each output to a magnitude.

    a [rank, in], b [out, rank], magnitude [out]. The matrix is [in, out] in the checkpoint if it is `transposed`.
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float
    transposed: bool
    magnitude: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Sizes of the matrix in the checkpoint."""
        sizes = self.b.shape[0], self.a.shape[1]
        return sizes[::-1] if self.transposed else sizes

    def applied(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the matrix after the change. f32"""
        matrix = weight.T.float() if self.transposed else weight.float()
        matrix = matrix + self.scale * (self.b.float() @ self.a.float())
        if self.magnitude is not None:
            matrix = matrix * (self.magnitude.float().flatten() / matrix.norm(dim=1)).unsqueeze(1)
        return matrix.T if self.transposed else matrix


@dataclass(frozen=True)
class Adapter:
    """An adapter of a directory: the change of each matrix by the matrix's name, and the tensors that replace others.

    Names are those of the model that it was made for. Changes are in memory, and what replaces is read by `readers`.
    """

    directory: Path
    changes: Mapping[str, Change]
    whole: Mapping[str, str]
    readers: Readers

    def want_products_alone(self) -> None:
        """Raise CheckpointError for what can be merged, but not added to a product: DoRA and whole weights."""
        of_dora = next((name for name, change in self.changes.items() if change.magnitude is not None), None)
        if of_dora or self.whole:
            what = f"DoRA of {of_dora!r}" if of_dora else f"whole weights of {next(iter(self.whole))!r}"
            raise CheckpointError(
                f"{self.directory}: an adapter for some requests cannot have {what}: merge it, with "
                "from_pretrained(…, adapter=…)"
            )


def open_adapter(directory: str | os.PathLike[str]) -> Adapter:
    """Open the adapter of a directory. CheckpointError if it is damaged, or is not LoRA."""
    path = Path(os.path.expanduser(directory))
    readers, config = _opened(path), read_json(path / ADAPTER_FILE)
    if config.get("peft_type") != "LORA":
        raise CheckpointError(f"{path}: expected an adapter of LoRA, got peft_type={config.get('peft_type')!r}")
    parts: dict[str, dict[str, str]] = {}
    whole: dict[str, str] = {}
    for full in readers:
        name = text_name(full.removeprefix(START))
        end = next((end for end in PARTS if name.endswith(end)), None)
        if end is not None:
            parts.setdefault(name.removesuffix(end), {})[PARTS[end]] = full
        elif ".lora_" in name:
            raise CheckpointError(f"{path}: {full!r} is a part of LoRA that cannot be read; merge it with PEFT")
        else:
            whole[name] = full
    changes = {f"{module}.weight": _change(path, config, module, own, readers) for module, own in parts.items()}
    return Adapter(path, changes, whole, readers)


def _change(path: Path, config: Mapping[str, Any], module: str, own: Mapping[str, str], readers: Readers) -> Change:
    """Read the change of a module's matrix, whose parts have their `own` names."""
    if not {"a", "b"} <= own.keys():
        raise CheckpointError(f"{path}: {module} has {', '.join(sorted(own))} alone; {AGAIN}")
    tensors = {part: readers[full](full) for part, full in own.items()}
    a, b = tensors["a"], tensors["b"]
    if not a.ndim == b.ndim == 2 or b.shape[1] != len(a):
        sizes = [list(tensor.shape) for tensor in tensors.values()]
        raise CheckpointError(f"{path}: expected [rank, in] and [out, rank] in the adapter of {module}, got {sizes}")
    transposed = bool(config.get("fan_in_fan_out")) or "lora_embedding" in own["a"]
    return Change(**tensors, scale=_scale(path, config, module, len(a)), transposed=transposed)


def adapted(checkpoint: Checkpoint, directory: str | os.PathLike[str]) -> Checkpoint:
    """Return the checkpoint with the adapter of a directory merged into it. Weights are still read one at a time.

    Matrices in few bits that it changes come as numbers. CheckpointError if the adapter is damaged, is not LoRA, or
    changes what the checkpoint does not have.
    """
    adapter = open_adapter(directory)
    changes = {_found(adapter, checkpoint, name): change for name, change in adapter.changes.items()}
    whole = {_found(adapter, checkpoint, name): full for name, full in adapter.whole.items()}
    for name, change in changes.items():
        if change.shape != (wanted := checkpoint.shape(name)):
            sizes = f"{list(change.shape)}, and the matrix {list(wanted)}"
            raise CheckpointError(f"{adapter.directory}: the adapter of {name} has sizes {sizes}")
    own: Readers = dict(checkpoint.readers)
    for name, change in changes.items():
        own[name] = partial(_merged, checkpoint, change)
    for name, full in whole.items():
        own[name] = partial(_replaced, adapter.readers, full)
    changed = changes.keys() | whole.keys()
    packed = {name: reader for name, reader in checkpoint.packed_readers.items() if name not in changed}
    shapes = {**checkpoint.shapes, **{name: change.shape for name, change in changes.items()}}
    return Checkpoint(checkpoint.directory, own, on_disk=False, packed=packed, shapes=shapes)


def open_adapted(
    path_or_name: PathOrName, cache_dir: PathOrName | None = None, adapter: PathOrName | None = None,
    images: bool = False,
) -> Checkpoint:  # fmt: skip
    """Open the weights of a model, with an adapter merged into them if there is one. Raises as `open_weights` and
    `adapted` do. Of a multimodal model, the log says what is left out, unless a family reads `images`.
    """
    checkpoint = open_weights(path_or_name, cache_dir)
    checkpoint = checkpoint.with_tower if images else checkpoint
    if parts := checkpoint.left_out:
        listed = ", ".join(f"{part} ({count} tensors)" for part, count in parts.items())
        _LOG.warning("%s: the text half of a multimodal model is loaded; left out: %s", checkpoint.directory, listed)
    return checkpoint if adapter is None else adapted(checkpoint, adapter)


def _merged(checkpoint: Checkpoint, change: Change, name: str) -> torch.Tensor:
    return change.applied(checkpoint.read(name))


def _replaced(readers: Readers, part: str, _: str) -> torch.Tensor:
    return readers[part](part)


def _opened(path: Path) -> Readers:
    safe, old = path / "adapter_model.safetensors", path / "adapter_model.bin"
    return open_bin(old) if old.exists() and not safe.exists() else open_safetensors(safe)


def _found(adapter: Adapter, checkpoint: Checkpoint, name: str) -> str:
    """Return a name as the checkpoint has it: that of a bare model lacks the first part."""
    for known in (name, name.partition(".")[2]):
        if known in checkpoint:
            return known
    raise CheckpointError(
        f"{adapter.directory}: the adapter changes {name!r}, which {checkpoint.directory} does not have"
    )


def _scale(path: Path, config: Mapping[str, Any], module: str, rank: int) -> float:
    """Return the factor of a matrix's change: patterns of names may give it another alpha."""
    patterns: Mapping[str, Any] = config.get("alpha_pattern") or {}
    with explain(f"{path / ADAPTER_FILE}: expected lora_alpha, and maybe others in alpha_pattern, for {module}"):
        meant = (name for name in patterns if re.fullmatch(rf"(.*\.)?({name})", module))
        alpha = float(next((patterns[name] for name in meant), config.get("lora_alpha", rank)))
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        if not math.isfinite(scale):
            raise ValueError(f"no scale of numbers: {alpha} for the rank {rank}")
    return scale
