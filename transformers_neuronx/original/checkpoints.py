"""Names of the original's `module`: file names of checkpoints, and saving a state dict as a split checkpoint."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from transformers_neuronx.support.files import exchange, staging
from transformers_neuronx.weights.directories import PathOrName, resolve
from transformers_neuronx.weights.formats import SPLIT_DIRECTORY, SPLIT_LISTING
from transformers_neuronx.weights.saving import save_tensors
from transformers_neuronx.weights.stored_module import PretrainedModel

_SAFETENSORS_MODEL_FILENAME = "model.safetensors"
_SAFETENSORS_MODEL_INDEX_FILENAME_JSON = "model.safetensors.index.json"
_PYTORCH_MODEL_BIN_FILENAME = SPLIT_DIRECTORY
_PYTORCH_MODEL_BIN_INDEX_FILENAME_JSON = "pytorch_model.bin.index.json"
_KEY_TO_FILENAME_JSON = SPLIT_LISTING


class WrappingCheckpointCompatibleModel(PretrainedModel):
    """The base of the original's compiled models."""


def sanitize_file_name(name: str) -> str:
    """Return a name with "_" for each character that file systems may not have."""
    return re.sub(r"[^-.A-Za-z0-9_]", "_", name)


def save_split(state_dict: Mapping[str, torch.Tensor], save_dir: PathOrName) -> None:
    """Save tensors as files of the directory `save_dir`, which is called pytorch_model.bin in a split checkpoint."""
    directory = Path(os.path.expanduser(save_dir)).absolute()
    with staging(directory.parent, directory.name) as stage:
        save_tensors(state_dict, stage / directory.name)
        exchange(stage, directory.parent)


def maybe_download_weights(path_or_repo_id: PathOrName, safe_serialization: bool = True, **kwargs: Any) -> str:
    """Return the directory of a checkpoint: a local one, or a hub model that is downloaded or found in the cache."""
    return str(resolve(path_or_repo_id, kwargs.get("cache_dir")))
