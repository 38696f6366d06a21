"""Checkpoints: the tensors of a model by name, read one at a time.

This file does not know what a tensor means: `weights.py` has the names and layouts of a model.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from transformers_neuronx.config.multimodal import left_out, text_name, tower_name
from transformers_neuronx.errors import CheckpointError
from transformers_neuronx.support.files import explain
from transformers_neuronx.weights.directories import PathOrName, gguf_at, resolve
from transformers_neuronx.weights.formats import FORMATS, Readers, format_in, open_bin, open_safetensors
from transformers_neuronx.weights.gguf import open_gguf
from transformers_neuronx.weights.other_formats import refuse_other_formats
from transformers_neuronx.weights.packed import Packed, PackedReaders, Unread
from transformers_neuronx.weights.published import form_in, parts_of
from transformers_neuronx.weights.saving import save_pretrained_split as save_pretrained_split, state_dict_of
from transformers_neuronx.weights.stored_module import PretrainedModel as PretrainedModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Checkpoint:
    """The tensors of one checkpoint by name. Opening it reads headers only; `read` maps one tensor from its file.

    Also a context manager. Tensors that were read stay valid after `close`. As the files are mapped, they may be
    removed while tensors are in use, but not overwritten in place. If it is `on_disk`, other processes find it there.
    Matrices in few bits are read as numbers; `packed` has them as they are stored. `shapes` are those that are known
    without reading. `left_out` counts the tensors of each part of a multimodal model that is not its text half, and
    `with_tower` is the checkpoint that has them, too.
    """

    left_out: Mapping[str, int] = MappingProxyType({})
    _with_tower: Checkpoint | None = None

    def __init__(
        self, directory: Path, readers: Readers, on_disk: bool = True, packed: PackedReaders | None = None,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:  # fmt: skip
        self.directory, self.on_disk = directory, on_disk
        self.names = frozenset(readers)
        self._readers, self._packed, self.shapes = readers, packed or {}, shapes or {}

    @property
    def with_tower(self) -> Checkpoint:
        """The checkpoint of both halves of a multimodal model; another one as it is."""
        return self._with_tower or self

    @property
    def readers(self) -> Readers:
        """For each tensor, the function that reads it."""
        return dict.fromkeys(sorted(self.names), self.read)

    @property
    def packed_readers(self) -> PackedReaders:
        """For each matrix in few bits, the function that reads it as it is stored."""
        return self._packed

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self.names))

    def __len__(self) -> int:
        return len(self.names)

    def shape(self, name: str) -> tuple[int, ...]:
        """Sizes of one tensor; raises as `read` does."""
        if name in self.shapes:
            return self.shapes[name]
        few = self.in_few_bits(name)
        return tuple(self.read(name).shape) if few is None else few.shape

    def dtype(self, name: str) -> torch.dtype:
        """Stored element type of one tensor; raises as `read` does."""
        few = self.in_few_bits(name)
        return self.read(name).dtype if few is None else few.outputs(torch.arange(1)).values.dtype

    def read(self, name: str) -> torch.Tensor:
        """Map one tensor from its file: bytes are read from the disk on access, writes never reach the file.

        CheckpointError if there is no such tensor, torch does not have its dtype, or the checkpoint was closed.
        """
        with self._reading(name):
            return self._readers[name](name)

    def in_few_bits(self, name: str) -> Packed | Unread | None:
        """Return a matrix as it is stored, if that is in few bits. Raises as `read` does.

        It is `Unread` if its outputs can be read one by one.
        """
        with self._reading(name):
            return self._packed[name](name) if name in self._packed else None

    def packed(self, name: str) -> Packed | None:
        """Return the whole matrix of `in_few_bits`."""
        few = self.in_few_bits(name)
        return few.whole() if isinstance(few, Unread) else few

    @contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        if name not in self.names:
            raise CheckpointError(f"{self.directory}: no tensor {name!r} among the {len(self)} of this checkpoint")
        if name not in self._readers:
            raise CheckpointError(f"{self.directory}: cannot read {name!r}, the checkpoint was closed; open it again")
        with explain(f"{self.directory}: cannot read {name!r}", "save it in a dtype that torch has"):
            yield

    def close(self) -> None:
        """Release the files. `read` raises CheckpointError afterwards."""
        self._readers, self._packed = {}, {}

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_weights(path_or_name: PathOrName, cache_dir: PathOrName | None = None) -> Checkpoint:
    """Open a checkpoint as `open_checkpoint` does, or a single file: safetensors, GGUF, or what `torch.save` made of a
    state dict.
    """
    path = Path(os.path.expanduser(path_or_name))
    if not path.is_file() or gguf_at(path):
        return open_checkpoint(path_or_name, cache_dir)
    return _text_half(Checkpoint(path, open_safetensors(path) if path.suffix == ".safetensors" else open_bin(path)))


def open_checkpoint(path_or_name: PathOrName, cache_dir: PathOrName | None = None) -> Checkpoint:
    """Open the checkpoint of a directory or a hub model in the first format of `FORMATS` that it has, or in GGUF.

    Of a multimodal model, only the text half is there, under the names of a text model. CheckpointError if a file is
    missing, truncated, contradicts its index, points outside the directory, or is a pickle of more than tensors. The
    error names the file, and the tensor if one is affected.
    """
    if file := gguf_at(path_or_name):
        readers, packed, shapes = open_gguf(file)
        return Checkpoint(file, readers, packed=packed, shapes=shapes)
    directory = resolve(path_or_name, cache_dir)
    found = format_in(directory)
    if not found:
        refuse_other_formats(directory)
        raise CheckpointError(f"{directory}: no checkpoint here; expected one of {', '.join(FORMATS)}")
    readers = FORMATS[found](directory / found)
    if form := form_in(directory):
        readers, packed = parts_of(directory, readers, form)
        return _text_half(Checkpoint(directory, readers, packed=packed))
    return _text_half(Checkpoint(directory, readers))


def checkpoint_of(model: PreTrainedModel) -> Checkpoint:
    """Return a transformers model's tensors as a checkpoint of it would have them."""
    return checkpoint_in_memory(state_dict_of(model), model.name_or_path or type(model).__name__)


def checkpoint_in_memory(state: Mapping[str, torch.Tensor], name: str) -> Checkpoint:
    """Return a checkpoint of these tensors. Errors call it `name`."""
    return _text_half(Checkpoint(Path(name), dict.fromkeys(state, state.__getitem__), on_disk=False))


def _text_half(checkpoint: Checkpoint) -> Checkpoint:
    """Return the text half of a multimodal checkpoint under the names of a text model; another one as it is."""
    parts = Counter(part for full in checkpoint if (part := left_out(full)))
    text = [full for full in checkpoint if not left_out(full)]
    names = {text_name(full): full for full in text}
    if names.keys() == checkpoint.names:
        return checkpoint
    if twice := [full for full in text if names[text_name(full)] != full]:
        name = text_name(twice[0])
        raise CheckpointError(f"{checkpoint.directory}: has {name!r} twice, as {twice[0]!r} and as {names[name]!r}")
    half = _renamed(checkpoint, names)
    half.left_out = parts
    half._with_tower = _renamed(checkpoint, names | {tower_name(full): full for full in checkpoint if left_out(full)})
    return half


def _renamed(checkpoint: Checkpoint, names: Mapping[str, str]) -> Checkpoint:
    """Return a checkpoint of tensors that have other names in this one."""
    packed = checkpoint.packed_readers
    return Checkpoint(
        checkpoint.directory,
        dict.fromkeys(names, lambda name: checkpoint.read(names[name])),
        checkpoint.on_disk,
        {name: lambda name: packed[names[name]](names[name]) for name, full in names.items() if full in packed},
    )
