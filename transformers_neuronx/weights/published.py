"""Quantized checkpoints as they are published: which tensors make up a matrix, and how a model stores it.

What is stored passes through: devices get the checkpoint's own numbers and scales.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch

from transformers_neuronx.config.published import Form, form_of
from transformers_neuronx.config.switches import QuantizationConfig
from transformers_neuronx.errors import CheckpointError
from transformers_neuronx.pyhlo.dtypes import to_torch
from transformers_neuronx.support.files import read_json
from transformers_neuronx.weights.formats import Readers
from transformers_neuronx.weights.packed import Packed, PackedReaders
from transformers_neuronx.weights.rows import Weight

SCALES = (".weight_scale", ".weight_scale_inv")  # ends of the names of a matrix's scales
OTHERS = re.compile(r"\.(input|output|k|v|q)_scale$")  # scales of activations and caches


def form_in(directory: Path) -> Form | None:
    """Return the form of a directory's weights, if its configuration says that they are quantized."""
    path = directory / "config.json"
    return form_of(read_json(path)) if path.exists() else None


def switches_of(form: Form, table: Sequence[Weight], layers: int) -> QuantizationConfig:
    """Return the options by which a model stores its matrices as the checkpoint does.

    Matrices that are not quantized in every layer are in the type of activations in all.
    """
    embeddings = {name for row in table if row.name == "embed" for name in row.source.split("|")}

    def is_plain(row: Weight) -> bool:
        tied = not embeddings.isdisjoint(row.source.split("|"))
        return tied or any(map(form.ignores, _modules(row, layers)))

    plain = [row for row in table if row.multiplies and is_plain(row)]
    return QuantizationConfig(
        quant_dtype=form.dtype,
        group_size=form.block[1],
        quantize_head=not any(row.name == "head.weight" for row in plain),
        no_quantize_list=[row.name.removesuffix(".weight") for row in plain if row.name != "head.weight"],
    )


def _modules(row: Weight, layers: int) -> list[str]:
    """The names of a row's modules in a checkpoint: of all layers, and all alternatives."""
    names = [name.removesuffix(".weight") for name in row.source.split("|")]
    return [name.replace("{}", str(layer)) for name in names for layer in range(row.layers or layers)]


def parts_of(directory: Path, readers: Readers, form: Form) -> tuple[Readers, PackedReaders]:
    """Return the readers of a quantized checkpoint's tensors under the names that they had before.

    Those of matrices in few bits come as numbers, and for themselves as they are stored.
    """
    scales = {name.rpartition("_scale")[0]: name for name in readers if name.endswith(SCALES)}

    def read(name: str) -> Packed:
        values, scale = (readers[part](part) for part in (name, scales[name]))
        return _packed(f"{directory}: {name}", form, values, scale)

    hidden = {*scales.values(), *filter(OTHERS.search, readers)}
    whole = {name: reader for name, reader in readers.items() if name not in hidden}
    return whole | dict.fromkeys(scales, lambda name: read(name).numbers), dict.fromkeys(scales, read)


def _packed(what: str, form: Form, values: torch.Tensor, scales: torch.Tensor) -> Packed:
    """Return the matrix of these parts. Raises CheckpointError if they do not fit each other."""
    if values.dtype is not to_torch(form.dtype) or values.ndim != 2:
        got = f"{str(values.dtype).removeprefix('torch.')}{list(values.shape)}"
        raise CheckpointError(f"{what}: expected a matrix of {form.dtype}, as config.json says, got {got}")
    sizes = [size if part is None else part for size, part in zip(values.shape, form.block, strict=True)]
    counts = [-(-size // part) for size, part in zip(values.shape, sizes, strict=True)]
    if scales.numel() != counts[0] * counts[1]:
        wanted = f"{counts[0]} × {counts[1]}, one for each {sizes[0]} × {sizes[1]} numbers"
        raise CheckpointError(f"{what}: expected scales {wanted}, got {list(scales.shape)}")
    scales = scales.float().reshape(counts).repeat_interleave(sizes[0], 0)[: values.shape[0]]
    return Packed(form.dtype, values, scales, sizes[1])
