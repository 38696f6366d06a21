"""Quantized checkpoints as they are published: which tensors make up a matrix, and how a model stores it.

What is stored passes through: devices get the checkpoint's own numbers and scales.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from transformers_neuronx.config.gguf import STORED
from transformers_neuronx.config.published import Form, Mixed, form_of
from transformers_neuronx.config.switches import QuantizationConfig
from transformers_neuronx.errors import CheckpointError
from transformers_neuronx.pyhlo.dtypes import to_torch
from transformers_neuronx.support.files import read_json
from transformers_neuronx.weights.formats import Readers
from transformers_neuronx.weights.packed import Packed, PackedReaders
from transformers_neuronx.weights.quantization import PLAIN
from transformers_neuronx.weights.rows import Weight

SCALES = (".weight_scale", ".weight_scale_inv")  # ends of the names of a matrix's scales
OTHERS = re.compile(r"\.(input|output|k|v|q)_scale$")  # scales of activations and caches


def form_in(directory: Path) -> Form | None:
    """Return the form of a directory's weights, if its configuration says that they are quantized."""
    path = directory / "config.json"
    form = form_of(read_json(path)) if path.exists() else None
    return form if isinstance(form, Form) else None


def switches_of(form: Form | Mixed, table: Sequence[Weight], layers: int) -> QuantizationConfig:
    """Return the options by which a model stores its matrices as the checkpoint does.

    If all have one form, those that are not quantized in every layer are in the type of activations in all.
    """
    if isinstance(form, Mixed):
        return _mixed(form, table, layers)
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


def _mixed(form: Mixed, table: Sequence[Weight], layers: int) -> QuantizationConfig:
    """The options by which each matrix of each layer is stored in its own way."""
    stored: dict[str, dict[str, list[int]]] = {}
    for row in table:
        if not (row.multiplies or row.name in ("embed", "head.weight")):
            continue
        plan: dict[str, list[int]] = {}
        for layer in range(row.layers or layers) if row.layered else [0]:
            names = row.at(layer).source.split("|")
            kind = next((form.kinds[name] for name in names if name in form.kinds), "")
            plan.setdefault(str(STORED[kind]) if kind in STORED else PLAIN, []).append(layer)
        if plan.keys() != {PLAIN}:
            stored[row.name] = plan
    types = Counter(text[:2] for plan in stored.values() for text, numbers in plan.items() for _ in numbers)
    return QuantizationConfig(max(types, key=types.__getitem__, default="s8"), stored=stored)


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
