"""Checkpoint files: finding them, reading their tensors one at a time, saving split directories.

This file handles the formats on disk. It refuses damaged, contradictory or executable files before a tensor is used.
It does not know what a tensor means: `weights.py` has the names and layouts of a model.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.utils import HFValidationError, validate_repo_id  # type: ignore[attr-defined]
from safetensors import safe_open

from transformers_neuronx.errors import CheckpointError
from transformers_neuronx.support.files import (
    AGAIN,
    exchange,
    explain,
    fsync,
    is_plain,
    kind,
    read_json,
    staging,
    unique,
    want_file,
)
from transformers_neuronx.weights.other_formats import ADAPTER_FILE, EMPTY, random_tensor, refuse_other_formats
from transformers_neuronx.weights.stored_module import PretrainedModel as PretrainedModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LOG = logging.getLogger(__name__)

PathOrName: TypeAlias = str | os.PathLike[str]
Readers: TypeAlias = dict[str, Callable[[str], torch.Tensor]]  # tensor name -> function that reads it, given that name

SPLIT_DIRECTORY = "pytorch_model.bin"
SPLIT_LISTING = "key_to_filename.json"
GENERATION_CONFIG = "generation_config.json"
CONFIG_FILES = ["config.json", GENERATION_CONFIG]
TOKENIZER_FILES = ["*token*.json", "vocab*", "merges.txt", "*.model", "chat_template*"]


def resolve(path_or_name: PathOrName, cache_dir: PathOrName | None = None) -> Path:
    """Return the directory of a checkpoint: a local one, or a hub model that is downloaded or found in the cache.

    Safetensors are fetched if the hub model has them, pickles only otherwise. `HF_HUB_OFFLINE` and the hub's cache,
    or another `cache_dir`, are respected. CheckpointError if there is no such directory, and no such hub model can be
    reached.
    """
    directory = _local_directory(path_or_name)
    if directory is not None:
        return directory
    name = os.fspath(path_or_name)
    safetensors = [*CONFIG_FILES, "*.safetensors", "model.safetensors.index.json"]
    directory = _download(name, safetensors, cache_dir, ignore=["*/*", "consolidated*"])
    if "safetensors" in format_in(directory):
        return directory
    return _download(name, [*CONFIG_FILES, "pytorch_model*"], cache_dir)


def resolve_tokenizer(path_or_name: PathOrName, cache_dir: PathOrName | None = None) -> Path:
    """Return the directory of a checkpoint's tokenizer, found as `resolve` does."""
    found = _local_directory(path_or_name)
    return found or _download(os.fspath(path_or_name), [*CONFIG_FILES, *TOKENIZER_FILES], cache_dir, ignore=["*/*"])


def load_config(path_or_name: PathOrName, cache_dir: PathOrName | None = None) -> dict[str, Any]:
    """Parse `config.json`, with the start and end tokens of `generation_config.json` if it has any.

    Nothing else of a hub model is downloaded. CheckpointError if it is missing or broken.
    """
    directory = _config_directory(path_or_name, cache_dir)
    if not os.path.lexists(directory / "config.json"):
        refuse_other_formats(directory)
    config, generation = read_json(directory / "config.json"), load_generation_config(directory)
    tokens = {name: generation.get(name) for name in ("eos_token_id", "decoder_start_token_id")}
    return config | {name: value for name, value in tokens.items() if value is not None}


def load_generation_config(path_or_name: PathOrName, cache_dir: PathOrName | None = None) -> dict[str, Any]:
    """Parse `generation_config.json`; empty if there is none. CheckpointError if it is broken."""
    path = _config_directory(path_or_name, cache_dir) / GENERATION_CONFIG
    return read_json(path) if path.exists() else {}


def _config_directory(path_or_name: PathOrName, cache_dir: PathOrName | None) -> Path:
    files = [*CONFIG_FILES, ADAPTER_FILE]
    return _local_directory(path_or_name) or _download(os.fspath(path_or_name), files, cache_dir)


def _local_directory(path_or_name: PathOrName) -> Path | None:
    """Return a local directory, or None if the argument can only be a hub name."""
    text = os.fspath(path_or_name)
    path = os.path.expanduser(text)
    if os.path.isdir(path):
        return Path(path)
    if os.path.lexists(path):
        refuse_other_formats(Path(path))
        raise CheckpointError(f"{path}: expected a checkpoint directory, found {kind(path)}; pass the directory")
    if not isinstance(path_or_name, str) or text.startswith((".", "/", "~")) or not _is_hub_name(text):
        wrong = "no such directory, and not a valid hub name such as 'owner/model'"
        raise CheckpointError(f"{path or repr(path)}: {wrong}; check the path")
    return None


def _is_hub_name(text: str) -> bool:
    try:
        validate_repo_id(text)
    except HFValidationError:
        return False
    return True


def _download(name: str, allow: list[str], cache_dir: PathOrName | None, ignore: list[str] | None = None) -> Path:
    wrong = f"{name!r} is neither a local directory nor a hub model that is cached or reachable"
    with explain(wrong, "check the spelling, log in if the model is gated, or go online once to cache it"):
        cache = None if cache_dir is None else os.path.expanduser(os.fspath(cache_dir))
        return Path(snapshot_download(name, allow_patterns=allow, ignore_patterns=ignore, cache_dir=cache))


class Checkpoint:
    """The tensors of one checkpoint by name. Opening it reads headers only; `read` maps one tensor from its file.

    Also a context manager. Tensors that were read stay valid after `close`. As the files are mapped, they may be
    removed while tensors are in use, but not overwritten in place.
    """

    def __init__(self, directory: Path, readers: Readers) -> None:
        self.directory = directory
        self.names = frozenset(readers)
        self._readers = readers

    @property
    def readers(self) -> Readers:
        """For each tensor, the function that reads it."""
        return dict.fromkeys(sorted(self.names), self.read)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self.names))

    def __len__(self) -> int:
        return len(self.names)

    def shape(self, name: str) -> tuple[int, ...]:
        """Sizes of one tensor; raises as `read` does."""
        return tuple(self.read(name).shape)

    def dtype(self, name: str) -> torch.dtype:
        """Stored element type of one tensor; raises as `read` does."""
        return self.read(name).dtype

    def read(self, name: str) -> torch.Tensor:
        """Map one tensor from its file: bytes are read from the disk on access, writes never reach the file.

        CheckpointError if there is no such tensor, torch does not have its dtype, or the checkpoint was closed.
        """
        if name not in self.names:
            raise CheckpointError(f"{self.directory}: no tensor {name!r} among the {len(self)} of this checkpoint")
        if name not in self._readers:
            raise CheckpointError(f"{self.directory}: cannot read {name!r}, the checkpoint was closed; open it again")
        with explain(f"{self.directory}: cannot read {name!r}", "save it in a dtype that torch has"):
            return self._readers[name](name)

    def close(self) -> None:
        """Release the files. `read` raises CheckpointError afterwards."""
        self._readers = {}

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_weights(path_or_name: PathOrName, cache_dir: PathOrName | None = None) -> Checkpoint:
    """Open a checkpoint as `open_checkpoint` does, or a single file: safetensors, or a state dict from `torch.save`."""
    path = Path(os.path.expanduser(path_or_name))
    if not path.is_file():
        return open_checkpoint(path_or_name, cache_dir)
    refuse_other_formats(path)
    return Checkpoint(path, open_safetensors(path) if path.suffix == ".safetensors" else _open_bin(path))


def open_checkpoint(path_or_name: PathOrName, cache_dir: PathOrName | None = None) -> Checkpoint:
    """Open the checkpoint of a directory or a hub model in the first format of `_FORMATS` that it has.

    CheckpointError if a file is missing, truncated, contradicts its index, points outside the directory, or is a pickle
    of more than tensors. The error names the file, and the tensor if one is affected.
    """
    directory = resolve(path_or_name, cache_dir)
    found = format_in(directory)
    if not found:
        refuse_other_formats(directory)
        raise CheckpointError(f"{directory}: no checkpoint here; expected one of {', '.join(_FORMATS)}")
    return Checkpoint(directory, _FORMATS[found](directory / found))


def format_in(directory: Path) -> str:
    # lexists: a dangling link is a broken checkpoint to report, not a reason to load the next format
    return next((file for file in _FORMATS if os.path.lexists(directory / file)), "")


def open_safetensors(path: Path, to_keep: bool = False) -> Readers:
    """Return the readers of a file's tensors; those `to_keep` share one mapping. CheckpointError if it is not whole."""
    want_file(path)

    def read(name: str) -> torch.Tensor:
        # opened for each tensor, so that pages of the file are not held longer than the tensor
        with safe_open(path, framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
        return tensor

    # checks the whole header: its length and JSON, offsets without holes or overlaps, and the length of the file
    with explain(f"{path}: not a whole safetensors file"):
        file: Any = safe_open(path, framework="pt")
        return dict.fromkeys(file.keys(), file.get_tensor if to_keep else read)


def _open_bin(path: Path) -> Readers:
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


_FORMATS: Mapping[str, Callable[[Path], Readers]] = {
    "model.safetensors": open_safetensors,
    "model.safetensors.index.json": partial(_open_index, open_shard=open_safetensors),
    f"{SPLIT_DIRECTORY}/{SPLIT_LISTING}": _open_split,
    "pytorch_model.bin": _open_bin,
    "pytorch_model.bin.index.json": partial(_open_index, open_shard=_open_bin),
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
        save_tensors(_state_dict(model), stage / SPLIT_DIRECTORY)
        exchange(stage, directory)


def checkpoint_of(model: PreTrainedModel) -> Checkpoint:
    """Return a transformers model's tensors as a checkpoint of it would have them."""
    return checkpoint_in_memory(_state_dict(model), model.name_or_path or type(model).__name__)


def checkpoint_in_memory(state: Mapping[str, torch.Tensor], name: str) -> Checkpoint:
    """Return a checkpoint of these tensors. Errors call it `name`."""
    return Checkpoint(Path(name), dict.fromkeys(state, state.__getitem__))


def _save_configs(model: PreTrainedModel, directory: Path) -> None:
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = str(model.dtype).removeprefix("torch.")
    config.save_pretrained(directory)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(directory)
    for file in directory.iterdir():
        fsync(file)


def _state_dict(model: PreTrainedModel) -> dict[str, torch.Tensor]:
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
