"""Quantized checkpoints as they are published: which tensors make up a matrix, and how a model stores it.

What is stored passes through: devices get the checkpoint's own numbers and scales.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from transformers_neuronx.config.gguf import STORED
from transformers_neuronx.config.published import Form, Mixed, form_of
from transformers_neuronx.config.switches import QuantizationConfig
from transformers_neuronx.errors import CheckpointError
from transformers_neuronx.pyhlo.dtypes import to_torch
from transformers_neuronx.support.files import read_json
from transformers_neuronx.weights import coded, words
from transformers_neuronx.weights.codes import CODES
from transformers_neuronx.weights.formats import Readers
from transformers_neuronx.weights.packed import Packed, PackedReaders, Unread
from transformers_neuronx.weights.quantization import PLAIN
from transformers_neuronx.weights.rows import Weight

SCALES = (".weight_scale", ".weight_scale_inv")  # ends of the names of a matrix's scales
_GPTQ = dict(values=".qweight", scales=".scales", zeros=".qzeros", groups=".g_idx", sizes=".shape")
_MXFP4 = dict(values=".weight_packed", scales=".weight_scale")
PARTS = dict(  # the ends of the names of a matrix's parts, for each packing
    compressed=_MXFP4 | dict(zeros=".weight_zero_point", groups=".weight_g_idx", sizes=".weight_shape"),
    mxfp4=_MXFP4,
    experts=dict(values="_blocks", scales="_scales"),
    nvfp4=_MXFP4 | dict(divisor=".weight_global_scale"),
    **dict.fromkeys(("gptq", "gptq_v2", "awq"), _GPTQ),
    torchao=dict(values="._weight_qdata", scales="._weight_scale", zeros="._weight_zero_point"),
    bitsandbytes={
        "scales": ".weight.absmax", "values": ".weight", "table": ".weight.quant_map",
        "nested scales": ".weight.nested_absmax", "nested table": ".weight.nested_quant_map",
        **{f"state of {name}": f".weight.quant_state.bitsandbytes__{name}" for name in ("nf4", "fp4")},
    },
)  # fmt: skip
OTHERS = re.compile(r"\.(input|output|k|v|q)(_global)?_scale$")  # scales of activations and caches


def form_in(directory: Path) -> Form | None:
    """Return the form of a directory's weights, if its configuration says that they are quantized."""
    path = directory / "config.json"
    form = form_of(read_json(path)) if path.exists() else None
    return form if isinstance(form, Form) else None


def switches_of(form: Form | Mixed, table: Sequence[Weight], layers: int) -> QuantizationConfig:
    """Return the options by which a model stores each matrix of each layer as the checkpoint does."""
    embeddings = {name for row in table if row.name == "embed" for name in row.source.split("|")}
    stored: dict[str, dict[str, list[int]]] = {}
    for row in table:
        if not (row.multiplies or row.name in ("embed", "head.weight")):
            continue
        plan: dict[str, list[int]] = {}
        for layer in range(row.layers or layers) if row.layered else [0]:
            names = row.at(layer).source.split("|")
            if isinstance(form, Mixed):
                each = (name for source in names for name in replace(row, source=source).sources)
                kinds = {form.kinds[name] for name in each if name in form.kinds}
                kind = next(iter(kinds)) if len(kinds) == 1 else ""  # experts of old files may have several
                text = str(STORED[kind]) if kind in STORED else PLAIN
            else:
                plain = not embeddings.isdisjoint(names) or any(form.ignores(n.removesuffix(".weight")) for n in names)
                text = PLAIN if plain else form.storage
            plan.setdefault(text, []).append(layer)
        if plan.keys() != {PLAIN}:
            stored[row.name] = plan
    names = [re.split("[/,]", text)[0] for plan in stored.values() for text in plan if text != PLAIN]
    own = {"s5": "s8", "s6": "s8"} | dict.fromkeys(CODES, "s4")  # what quant_dtype can name
    types = Counter(own.get(name, name) for name in names)
    return QuantizationConfig(max(types, key=types.__getitem__, default="s8"), stored=stored)


def parts_of(directory: Path, readers: Readers, form: Form) -> tuple[Readers, PackedReaders]:
    """Return the readers of a quantized checkpoint's tensors under the names that they had before.

    Those of matrices in few bits come as numbers, and for themselves as they are stored.
    """
    if form.packing == "experts":
        return _experts_of(directory, readers, form)
    if form.packing:
        return _packed_of(directory, readers, form)
    scales = {name.rpartition("_scale")[0]: name for name in readers if name.endswith(SCALES)}

    def read(name: str) -> Packed:
        values, scale = (readers[part](part) for part in (name, scales[name]))
        turned = _is_turned(form, name)
        found = _packed(f"{directory}: {name}", form, values.T if turned else values, scale)
        return replace(found, transposed=turned)

    hidden = {*scales.values(), *filter(OTHERS.search, readers)}
    whole = {name: reader for name, reader in readers.items() if name not in hidden}
    return whole | dict.fromkeys(scales, lambda name: _numbers(read(name))), dict.fromkeys(scales, read)


def _packed_of(directory: Path, readers: Readers, form: Form) -> tuple[Readers, PackedReaders]:
    """The same for matrices whose numbers are packed into words or bytes."""
    ends = PARTS[form.packing]
    first = ends["scales" if form.packing == "bitsandbytes" else "values"]  # what only such matrices have
    modules = {name.removesuffix(first) for name in readers if name.endswith(first)}
    unpack = coded.packed if form.dtype in CODES else _of_torchao if form.packing == "torchao" else words.packed

    def read(name: str) -> Packed:
        parts = {part: name.removesuffix(".weight") + end for part, end in ends.items()}
        found = {part: readers[full](full) for part, full in parts.items() if full in readers}
        return replace(unpack(f"{directory}: {name}", form, found), transposed=_is_turned(form, name))

    hidden = {module + end for module in modules for end in ends.values()} | {*filter(OTHERS.search, readers)}
    matrices = [f"{module}.weight" for module in modules]
    whole = {name: reader for name, reader in readers.items() if name not in hidden}
    return whole | dict.fromkeys(matrices, lambda name: _numbers(read(name))), dict.fromkeys(matrices, read)


def _experts_of(directory: Path, readers: Readers, form: Form) -> tuple[Readers, PackedReaders]:
    """The same for experts that are in one tensor. The matrix of each gets a name of its own, with its number."""
    ends = PARTS[form.packing]
    stacks = {name.removesuffix(ends["values"]) for name in readers if name.endswith(ends["values"])}
    places: dict[str, tuple[str, int]] = {}
    for stack in stacks:
        module, _, part = stack.rpartition(".")
        sizes = readers[stack + ends["values"]](stack + ends["values"]).shape
        places |= {f"{module}.{number}.{part}": (stack, number) for number in range(sizes[0] if sizes else 0)}

    def read(name: str) -> Unread:
        stack, number = places[name]
        parts = {part: readers[stack + end](stack + end) for part, end in ends.items() if stack + end in readers}
        return coded.expert(f"{directory}: {stack}", form, parts, number)

    hidden = {stack + end for stack in stacks for end in ends.values()}
    whole = {name: reader for name, reader in readers.items() if name not in hidden}
    return whole | dict.fromkeys(places, lambda name: _numbers(read(name).whole())), dict.fromkeys(places, read)


def _is_turned(form: Form, name: str) -> bool:
    return form.turned is not None and form.turned.fullmatch(name) is not None


def _numbers(packed: Packed) -> torch.Tensor:
    """Return a matrix as it is in a checkpoint of numbers."""
    return packed.numbers.T if packed.transposed else packed.numbers


def _of_torchao(what: str, form: Form, parts: Mapping[str, torch.Tensor]) -> Packed:
    """Return the matrix of these parts, in which no number but zero stands for zero."""
    if "scales" not in parts:
        raise CheckpointError(f"{what}: its scales are missing")
    if "zeros" in parts and parts["zeros"].any():
        raise CheckpointError(f"{what}: expected symmetric numbers, found others than 0 in their zero_point")
    return _packed(what, form, parts["values"], parts["scales"])


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
