"""Models in GGUF files: their tensors under the names that Transformers has, as its checkpoints have them.

llama.cpp's converter renames tensors and changes some; both is undone here. Matrices in few bits stay in these.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from transformers_neuronx.config.gguf import GGUF, STORED, attributes, of_weights
from transformers_neuronx.config.gguf_metadata import OTHER, Described
from transformers_neuronx.config.gguf_positions import FACTORS
from transformers_neuronx.config.published import QUANTIZATION
from transformers_neuronx.errors import CheckpointError
from transformers_neuronx.weights.formats import Readers
from transformers_neuronx.weights.gguf_blocks import packed
from transformers_neuronx.weights.gguf_file import Elements, GgufFile, StoredTensor, open_files
from transformers_neuronx.weights.gguf_names import (
    AFTER_KEYS,
    IN_TURNS,
    KERNELS,
    LAYERS,
    NAME,
    NAMES,
    OF_DELTA,
    OF_FEATURES,
    OF_HEADS,
    PAIRED,
    PIECES,
    PLUS_ONE,
    RATES,
    ROWS,
    TURNED,
)
from transformers_neuronx.weights.layouts import Layout, as_is, pairs_as_halves, section_per_head, turns_as_heads
from transformers_neuronx.weights.packed import Packed, PackedReaders, Unread

TYPES = dict(F32=torch.float32, F16=torch.float16, BF16=torch.bfloat16)
MOST_LAYERS = 4096  # values of an array of the metadata that is read as a list


@dataclass(frozen=True)
class _Source:
    """What a tensor of the checkpoint is made of: rows of a stored one in the order that `rows` says, changed `after`.

    Or several, of one type and shape. They take turns with their features, which are the last axis in the checkpoint.
    `inputs` orders the inputs of a matrix, of which each `run` stays together.
    """

    tensors: tuple[StoredTensor, ...]
    rows: Layout = as_is
    inputs: Layout = as_is
    run: int = 1
    after: Layout = as_is
    transposed: bool = False

    @property
    def kind(self) -> str:
        return self.tensors[0].kind.name

    @property
    def shape(self) -> tuple[int, ...]:
        *lead, last = self.tensors[0].shape[::-1] if self.transposed else self.tensors[0].shape
        sizes = (*lead, len(self.tensors) * last)
        if self.rows is self.after is as_is:
            return sizes
        return tuple(self.after(self.rows(torch.empty(sizes, device="meta"))).shape)

    @property
    def in_few_bits(self) -> bool:
        return self.kind in STORED

    def in_outputs(self) -> Unread:
        kind, blocks = self.kind, [tensor.rows().numpy() for tensor in self.tensors]
        inputs, count = self.tensors[0].shape[1], len(blocks)
        order = self.rows(torch.arange(count * len(blocks[0])).unsqueeze(1))[:, 0]
        columns = self.inputs(torch.arange(inputs))

        def read(numbers: torch.Tensor) -> Packed:
            # NumPy copies row by row. PyTorch would wait for a thread on each core.
            places = order[numbers].numpy()
            if count == 1:
                found = packed(kind, torch.from_numpy(blocks[0].take(places, 0)))
                return found if self.inputs is as_is else found.reordered(columns, self.run)
            taken = np.empty((len(places), *blocks[0].shape[1:]), np.uint8)
            for turn, each in enumerate(blocks):
                here = places % count == turn
                taken[here] = each.take(places[here] // count, 0)
            return packed(kind, torch.from_numpy(taken))

        return Unread((len(order), inputs), read, self.transposed)

    def numbers(self) -> torch.Tensor:
        if self.in_few_bits:
            found = self.in_outputs().whole().numbers
        else:
            parts = [self.rows(tensor.rows().view(TYPES[self.kind])) for tensor in self.tensors]
            if self.inputs is not as_is:
                parts = [part[:, self.inputs(torch.arange(part.shape[1]))] for part in parts]
            axis = 0 if self.transposed else parts[0].ndim - 1
            found = torch.stack(parts, axis + 1).flatten(axis, axis + 1) if parts[1:] else parts[0]
        found = self.after(found)
        return found.T if self.transposed else found


def open_gguf(path: Path) -> tuple[Readers, PackedReaders, dict[str, tuple[int, ...]]]:
    """Return the readers of a model's tensors by the names of a checkpoint, and their shapes. Reads headers only.

    Those of matrices in few bits come as numbers, and for themselves as they are stored. Of a split model, `path` is
    any of the files. CheckpointError if a file is missing or damaged, or if such a model is not read.
    """
    file = open_files(path)
    described = _described(file)
    sources = _sources(file, described, of_weights(described))

    def read(name: str) -> torch.Tensor:
        return sources[name].numbers()

    def read_packed(name: str) -> Unread:
        return sources[name].in_outputs()

    in_few_bits = [name for name, source in sources.items() if source.in_few_bits]
    shapes = {name: source.shape for name, source in sources.items()}
    return dict.fromkeys(sources, read), dict.fromkeys(in_few_bits, read_packed), shapes


def attributes_of(path: Path) -> dict[str, Any]:
    """Return the attributes that config.json would have. Raises as `open_gguf` does.

    If a matrix is in few bits, `quantization_config` has the ggml type of each matrix, and `dtype`, that of
    activations, is bf16. Otherwise it is the matrices' type.
    """
    file = open_files(path)
    described = _described(file)
    found = attributes(described)
    sources = _sources(file, described, found)
    matrices = {n: each for n, each in sources.items() if len(each.shape) == 2 and not n.endswith("bias")}
    kinds = {name: source.kind for name, source in matrices.items()}
    if any(source.in_few_bits for source in matrices.values()):
        return found | {"dtype": "bfloat16", QUANTIZATION: dict(quant_method=GGUF, matrices=kinds)}
    usual = Counter(kinds.values()).most_common(1)[0][0]
    return found | dict(dtype=str(TYPES[usual]).removeprefix("torch."))


def model_type_of(path: Path) -> str:
    """Return the model type in Transformers. Raises as `open_gguf` does."""
    return _described(open_files(path)).model_type


def _described(file: GgufFile) -> Described:
    def numbers(name: str) -> list[float]:
        tensor = file.tensors[name]
        if tensor.kind.name not in TYPES:
            raise CheckpointError(
                f"{file.path}: {name!r} has the type {tensor.kind.name}, expected F32; convert it again"
            )
        return [float(number) for number in _Source((tensor,)).numbers()]

    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    metadata = {key: _of_layers(key, value) for key, value in file.metadata.items()}
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    find = tokens.find if isinstance(tokens, Elements) else lambda texts: []
    return Described(str(file.path), metadata, shapes, numbers, find)


def _of_layers(key: str, value: Any) -> Any:
    """Return a value of the metadata, as a list if it is an array of the model with one for each layer at most."""
    array = isinstance(value, Elements) and not key.startswith(("general.", "tokenizer."))
    return value.read() if array and value.count <= MOST_LAYERS else value


def _sources(file: GgufFile, described: Described, facts: Mapping[str, Any]) -> dict[str, _Source]:
    """Return what each tensor of the checkpoint is made of, given the model's attributes."""
    found: dict[str, list[StoredTensor]] = {}
    guesses = tuple(f"blk.{layer}." for layer in range(described.layers, described.whole("block_count")))
    for tensor in file.tensors.values():
        if tensor.name in FACTORS or tensor.name.endswith(".attn_rot_embd.weight"):  # frequencies, in old files
            continue
        if tensor.name.startswith(guesses):  # those of layers that guess tokens
            continue
        for name, part in _named(described, facts, tensor):
            found.setdefault(name, []).append(part)
    return {name: _source(described, facts, name, *parts) for name, parts in found.items()}


def _named(file: Described, facts: Mapping[str, Any], tensor: StoredTensor) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the names that a stored tensor has in the checkpoint: one, or one for each of the experts in it."""
    family, match = facts["model_type"], NAME.fullmatch(tensor.name)
    layer, part, expert, end = match.groups("") if match else ("", "", "", "")
    key = f"{'blk.' if layer else ''}{part}{'.*' if expert else ''}"
    known = NAMES[family]
    if not known.keys() & {key if end else "", f"{key}.{end}"}:
        raise file.refused(f"{tensor.name!r} is none of the tensors of a {family} model", OTHER)
    start = LAYERS.get(family, "model.layers.{}.").format(layer) if layer else ""
    if key in known:
        names = [f"{start}{name}.{end}" for name in known[key].split("|")]
    else:
        names = [start + known[f"{key}.{end}"]]
    if not key.endswith("_exps") or "{}" not in names[0]:
        yield from ((name.format(int(expert or 0)), tensor) for name in names)
        return
    count = file.whole("expert_count")
    if len(tensor.shape) != 3 or tensor.shape[0] != count:
        raise file.refused(f"{tensor.name!r} has sizes {list(tensor.shape)}, expected matrices of {count} experts")
    yield from ((names[0].format(number), tensor.part(number)) for number in range(count))


def _source(file: Described, facts: Mapping[str, Any], name: str, *tensors: StoredTensor) -> _Source:
    """Return how a tensor of the checkpoint is made of stored ones, whose names llama.cpp has given."""
    family, (tensor, *more) = facts["model_type"], sorted(tensors, key=lambda tensor: tensor.name)  # a gate is first
    _check(file, family, name, tensor, more)
    turned = family in TURNED and TURNED[family].fullmatch(tensor.name) is not None
    source = _Source((tensor, *more), after=_after(family, tensor), transposed=turned)
    if family in PAIRED and (match := re.search(r"\.attn_([qk])\.", tensor.name)):
        heads, size = facts["num_attention_heads" if match[1] == "q" else "num_key_value_heads"], facts["head_dim"]
        if tensor.shape[0] != heads * size:
            what = f"rows of {heads} heads with {size} features"
            raise file.refused(f"{tensor.name!r} has sizes {list(tensor.shape)}, expected {what}")
        return replace(source, rows=pairs_as_halves(size, size))
    if file.architecture == "qwen3next":
        return _with_pieces_of_heads(file, facts, name, source)
    return _with_heads_of_values(file, facts, source) if family in OF_DELTA else source


def _check(file: Described, family: str, name: str, tensor: StoredTensor, more: Sequence[StoredTensor]) -> None:
    """Raise CheckpointError if a tensor of the checkpoint cannot be made of these stored ones."""
    stored, sizes, kernel = tensor.name, list(tensor.shape), tensor.name.endswith(KERNELS)
    in_turns = family in IN_TURNS and IN_TURNS[family].fullmatch(stored)
    if len(more) > bool(in_turns):
        raise file.refused(f"{' and '.join(repr(each.name) for each in (tensor, *more))} are both {name}")
    if in_turns and not more:
        raise file.refused(f"{stored!r} is alone, expected both ffn_gate_exps and ffn_up_exps")
    if in_turns and (more[0].kind, more[0].shape) != (tensor.kind, tensor.shape):
        raise file.refused(f"{stored!r} and {more[0].name!r} must have one type and the same sizes", OTHER)
    if kernel and len(sizes) != 2:
        raise file.refused(f"{stored!r} has sizes {sizes}, expected [channels, taps]")
    if tensor.kind.name in STORED and (len(sizes) != 2 or kernel or stored.endswith("bias")):
        raise file.refused(f"{stored!r} {sizes} has the type {tensor.kind.name}, which only matrices have")


def _after(family: str, tensor: StoredTensor) -> Layout:
    """Return what undoes the converter's changes of a tensor's numbers and axes."""
    stored = tensor.name
    if stored.endswith(KERNELS):
        return lambda kernels: kernels.unsqueeze(1)
    if stored.endswith(ROWS) and len(tensor.shape) == 1:
        return lambda row: row.unsqueeze(0)
    if stored.endswith(RATES):
        return lambda rates: (-rates.float()).log()
    if family in PLUS_ONE and stored.endswith("norm.weight") and not stored.endswith("ssm_norm.weight"):
        return lambda weight: weight.float() - 1
    return as_is


def _with_heads_of_values(file: Described, facts: Mapping[str, Any], source: _Source) -> _Source:
    """Return a tensor of a delta net with its heads of values in a checkpoint's order, where those of a head of keys
    follow each other. In a file, the first of each come first, then the second ones.
    """
    (tensor,) = source.tensors
    match = NAME.fullmatch(tensor.name)
    if match is None or match[2] not in (*OF_HEADS, *OF_FEATURES):
        return source
    keys, heads, size = (facts[f"linear_{name}"] for name in ("num_key_heads", "num_value_heads", "value_head_dim"))
    before = 2 * keys * facts["linear_key_head_dim"] if match[2] in AFTER_KEYS else 0
    width, axis = size if match[2] in OF_FEATURES else 1, int(match[2] == "ssm_out")
    if len(tensor.shape) <= axis or tensor.shape[axis] != before + heads * width:
        what = f"{before + heads * width} {'inputs' if axis else 'rows'}"
        raise file.refused(f"{tensor.name!r} has sizes {list(tensor.shape)}, expected {what}")
    order = turns_as_heads(heads // keys, width, before)
    if not axis:
        return replace(source, rows=order)
    if (stored := STORED.get(source.kind)) and width % stored.group:
        what = f"{tensor.name!r} in {source.kind}, where {stored.group} inputs share a scale"
        raise file.refused(f"{what}, has heads of {width} inputs", OTHER)
    return replace(source, inputs=order, run=width)


def _with_pieces_of_heads(file: Described, facts: Mapping[str, Any], name: str, source: _Source) -> _Source:
    """Return a tensor of a delta net of Qwen3-Next. Some have all that each head of keys has, piece after piece."""
    (tensor,) = source.tensors
    keys, heads = facts["linear_num_key_heads"], facts["linear_num_value_heads"]
    key, values = facts["linear_key_head_dim"], facts["linear_value_head_dim"] * heads // keys
    of_each = {".ssm_ba.": (heads // keys,) * 2, ".ssm_in.": (key, key, values, values)}
    sizes = next((sizes for part, sizes in of_each.items() if part in tensor.name), None)
    if sizes is None:
        return source
    if tensor.shape[0] != keys * sum(sizes):
        raise file.refused(f"{tensor.name!r} has sizes {list(tensor.shape)}, expected {keys * sum(sizes)} rows")
    pieces = [section_per_head(number, sizes) for number in PIECES[name.split(".")[-2]]]
    return replace(source, rows=lambda rows: torch.cat([piece(rows) for piece in pieces]))
