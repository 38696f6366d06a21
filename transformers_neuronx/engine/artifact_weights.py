"""Weights in artifacts, as the devices store them: files of tensors, with a piece for each device or one for all.

A tensor is named after one of the weights that share it, and a piece after the tensor and its rank:
`layer.3.mlp.up@0`. The manifest lists the tensors of each file.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

import safetensors.torch
import torch

from transformers_neuronx.engine.decoder import Decoder
from transformers_neuronx.engine.manifest import MANIFEST, Tensors
from transformers_neuronx.engine.programs import Programs
from transformers_neuronx.errors import CheckpointError
from transformers_neuronx.pyhlo.dtypes import numpy_to_torch
from transformers_neuronx.support import files
from transformers_neuronx.support.progress import bar
from transformers_neuronx.weights import panels
from transformers_neuronx.weights.formats import Readers, open_safetensors
from transformers_neuronx.weights.reading import Key, Sharded, collapsed, expand
from transformers_neuronx.weights.rows import Weight

Pieces: TypeAlias = Callable[[], list[torch.Tensor]]  # reads a tensor: one piece per device, or one for all


def save_weights(decoder: Decoder, directory: Path) -> dict[str, Tensors]:
    """Write a file per layer and one for all other weights, with one file in memory at a time. Ties are saved once."""
    groups: dict[str, Tensors] = {}
    places: dict[int, list[str]] = {}
    held = {text_of(key): tensor for key, tensor in decoder.weights.items()}
    for (layer, _), (name, tensor) in zip(decoder.weights, held.items(), strict=True):
        if id(tensor) not in places:
            group = groups.setdefault(f"weights-{'shared' if layer is None else f'layer-{layer:04}'}.safetensors", {})
            places[id(tensor)] = group[name] = []
        places[id(tensor)].append(name)
    with bar("saving weights", len(held)) as saved:
        for file, tensors in groups.items():
            content = {}
            for name in tensors:
                shards = [numpy_to_torch(shard.copy()) for shard in held[name].shards()]  # the device's are read-only
                bytes_of = [shard.contiguous().flatten().view(torch.uint8) for shard in shards]
                kept = shards[:1] if all(of.equal(bytes_of[0]) for of in bytes_of) else shards
                content.update({_ranked(name, rank): shard for rank, shard in enumerate(kept)})
            files.write(directory / file, _aligned(safetensors.torch.save(content)))
            saved.update(sum(map(len, tensors.values())))
    return groups


def _aligned(data: bytes) -> bytes:
    """Return a safetensors file whose tensors are aligned for a processor's vectors, so that they work in place."""
    end = 8 + int.from_bytes(data[:8], "little")
    spaces = -end % 64  # after the header, which the format allows
    return b"".join([(end - 8 + spaces).to_bytes(8, "little"), data[8:end], b" " * spaces, data[end:]])


def text_of(key: Key) -> str:
    layer, name = key
    return name if layer is None else f"layer.{layer}.{name}"


def key_of(text: str) -> Key:
    layered = re.fullmatch(r"layer\.(\d{1,9})\.(.+)", text)
    return (int(layered[1]), layered[2]) if layered else (None, text)


def _ranked(name: str, rank: int) -> str:
    return f"{name}@{rank}"


def read_tensors(path: Path, tensors: Tensors) -> Iterator[tuple[list[str], Pieces]]:
    """Yield each tensor of a file: the weights that share it, and a function that reads its pieces.

    CheckpointError if the file is not whole, or lacks one of the `tensors` that the manifest lists.
    """
    readers = open_safetensors(path, to_keep=True)
    for name, names in tensors.items():
        if _ranked(name, 0) not in readers:
            raise CheckpointError(f"{path}: {name!r} is missing, but {MANIFEST} lists it")
        yield names, functools.partial(_pieces, path, readers, name)


def _pieces(path: Path, readers: Readers, name: str) -> list[torch.Tensor]:
    ranks = itertools.takewhile(readers.__contains__, (_ranked(name, rank) for rank in itertools.count()))
    with files.explain(f"{path}: cannot read {name!r}"):
        return [readers[ranked](ranked) for ranked in ranks]


def want_weights(listed: Mapping[str, Tensors], programs: Programs, manifest: Path) -> None:
    """Raise CheckpointError unless exactly the weights of the programs are listed."""
    wanted = {text_of(key) for key, _ in expand(programs.table, programs.layers)}
    found = {name for tensors in listed.values() for names in tensors.values() for name in names}
    if wanted != found:
        wrong = f"lists weights that differ from the model's: {collapsed(sorted(wanted ^ found))}"
        raise CheckpointError(f"{manifest}: {wrong}; {files.AGAIN}")


def for_devices(
    tensors: Iterable[tuple[list[str], Pieces]], programs: Programs, amp: str, here: range
) -> Iterator[Sharded]:
    """Yield saved tensors for the devices that are here, in the layout that they need. It may not be that of those they
    were saved from.
    """
    rows = {text_of(key): row for key, row in expand(programs.table, programs.layers)}
    for names, pieces in tensors:
        row = rows[names[0]]
        laid_out = functools.partial(_laid_out, row, programs.degree, here, pieces)
        yield Sharded([*map(key_of, names)], row.dtype or amp, laid_out)


def _laid_out(row: Weight, degree: int, here: range, pieces: Pieces) -> list[torch.Tensor]:
    """Return the pieces of a weight that are for here, in panels or as matrices, as its row requires."""
    saved = pieces()
    own = saved if len(saved) == 1 else saved[here.start : here.stop]
    return [_converted(row, degree, piece) for piece in own]


def _converted(row: Weight, degree: int, piece: torch.Tensor) -> torch.Tensor:
    """Return a piece as it is, or in panels, or as a matrix; of experts, each."""
    rank = piece.ndim - (row.experts is not None)
    if row.word and rank == 2:
        convert = functools.partial(panels.laid_out, word=row.word)
    elif not row.word and rank == 4:
        convert = functools.partial(panels.as_matrix, shape=row.share(degree))
    else:
        return piece
    return convert(piece) if row.experts is None else torch.stack([*map(convert, piece)])
