"""Saves a model of Transformers as a split checkpoint: one file per tensor."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from transformers_neuronx.errors import CheckpointError
from transformers_neuronx.support.files import exchange, fsync, staging
from transformers_neuronx.weights.directories import PathOrName
from transformers_neuronx.weights.formats import SPLIT_DIRECTORY, SPLIT_LISTING, format_in

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def save_pretrained_split(model: PreTrainedModel, save_directory: PathOrName) -> None:
    """Save a transformers model as `config.json` and one file per tensor, each in its own dtype, under
    `pytorch_model.bin/`; tied tensors are written once.

    Other files in `save_directory` are kept. An earlier checkpoint is replaced once the new one is complete and on
    the disk; a save that fails or is interrupted leaves it unchanged. A killed process may leave
    `.pytorch_model.bin.tmp-*`, to be deleted, or during the exchange the earlier one in `.pytorch_model.bin.old-*`.

    CheckpointError if the directory holds safetensors, which would be loaded instead of what is saved, or if a tensor
    has no data (the meta device).
    """
    directory = Path(os.path.expanduser(save_directory))
    found = format_in(directory)
    if "safetensors" in found:
        raise CheckpointError(
            f"{directory / found} would be loaded instead of the split checkpoint saved next to it; "
            "remove it or save to another directory"
        )
    with staging(directory, SPLIT_DIRECTORY) as stage:
        _save_configs(model, stage)
        save_tensors(state_dict_of(model), stage / SPLIT_DIRECTORY)
        exchange(stage, directory)


def _save_configs(model: PreTrainedModel, directory: Path) -> None:
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = str(model.dtype).removeprefix("torch.")
    config.save_pretrained(directory)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(directory)
    for file in directory.iterdir():
        fsync(file)


def state_dict_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return a model's tensors under the names that its checkpoints use."""
    state: dict[str, torch.Tensor] = model.state_dict()
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # before transformers 5 modules and checkpoints had the same names
        return state
    converted: dict[str, torch.Tensor] = revert_weight_conversion(model, state)
    return converted


def save_tensors(state: Mapping[str, torch.Tensor], directory: Path) -> None:
    directory.mkdir()
    listing: dict[str, str] = {}
    written: dict[tuple[object, ...], str] = {}  # the same view of the same storage is a tied tensor
    for idx, (name, tensor) in enumerate(state.items()):
        if tensor.is_meta:
            raise CheckpointError(f"cannot save {name!r}: it is on the meta device and has no data; load it first")
        storage = tensor.untyped_storage().data_ptr()
        view = (tensor.device, storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        if view not in written:
            written[view] = f"p{idx}.{re.sub(r'[^-.A-Za-z0-9_]', '_', name)}"
            _save_tensor(tensor, directory / written[view])
        listing[name] = written[view]
    (directory / SPLIT_LISTING).write_text(json.dumps(listing, indent=2))
    fsync(directory / SPLIT_LISTING)
    fsync(directory)


def _save_tensor(tensor: torch.Tensor, path: Path) -> None:
    tensor = tensor.detach().cpu().contiguous()
    if tensor.untyped_storage().nbytes() > tensor.nbytes:
        tensor = tensor.clone()  # torch.save writes the whole storage of a view
    torch.save(tensor, path)
    fsync(path)
