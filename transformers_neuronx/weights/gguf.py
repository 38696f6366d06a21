"""Models in GGUF files: their tensors under the names that Transformers has, as its checkpoints have them.

llama.cpp's converter renames tensors and changes some; both is undone here. Matrices in few bits stay in these.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from transformers_neuronx.config.gguf import GGUF, STORED, attributes
from transformers_neuronx.config.gguf_metadata import OTHER, Described
from transformers_neuronx.config.gguf_positions import FACTORS
from transformers_neuronx.config.published import QUANTIZATION
from transformers_neuronx.errors import CheckpointError
from transformers_neuronx.weights.formats import Readers
from transformers_neuronx.weights.gguf_blocks import packed
from transformers_neuronx.weights.gguf_file import GgufFile, StoredTensor, open_files
from transformers_neuronx.weights.layouts import Layout, as_is, pairs_as_halves
from transformers_neuronx.weights.packed import Packed, PackedReaders, Unread

TYPES = dict(F32=torch.float32, F16=torch.float16, BF16=torch.bfloat16)
# The layer's number, a name, an expert's number, and what it is.
NAME = re.compile(r"(?:blk\.(0|[1-9][0-9]{0,5})\.)?([a-z_0-9]+)(?:\.([0-9]{1,5}))?\.(weight|bias)")


# Names in the file and in the checkpoint, by model type. Those in "blk" are of a layer, which `LAYERS` begins. "*" and
# "{}" stand for the number of an expert; the experts of "_exps" are stacked in one tensor.
_LLAMA = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.attn_norm": "input_layernorm",
    "blk.attn_q": "self_attn.q_proj",
    "blk.attn_k": "self_attn.k_proj",
    "blk.attn_v": "self_attn.v_proj",
    "blk.attn_output": "self_attn.o_proj",
    "blk.ffn_norm": "post_attention_layernorm",
    "blk.ffn_gate": "mlp.gate_proj",
    "blk.ffn_up": "mlp.up_proj",
    "blk.ffn_down": "mlp.down_proj",
}
_EXPERTS = dict(ffn_gate="w1", ffn_down="w2", ffn_up="w3")
_MIXTRAL = {
    f"blk.{part}{end}": f"block_sparse_moe.experts.{{}}.{n}" for part, n in _EXPERTS.items() for end in ("_exps", ".*")
}
_QWEN3_MOE = {f"blk.ffn_{part}_exps": f"mlp.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")}
_NORMS_OF_HEADS = {"blk.attn_q_norm": "self_attn.q_norm", "blk.attn_k_norm": "self_attn.k_norm"}
_SANDWICH = {
    "blk.post_attention_norm": "post_attention_layernorm",
    "blk.ffn_norm": "pre_feedforward_layernorm",
    "blk.post_ffw_norm": "post_feedforward_layernorm",
}
NAMES: Mapping[str, Mapping[str, str]] = dict(
    llama=_LLAMA,
    mistral=_LLAMA,
    mixtral=_LLAMA | _MIXTRAL | {"blk.ffn_gate_inp": "block_sparse_moe.gate"},
    qwen2=_LLAMA,
    qwen3=_LLAMA | _NORMS_OF_HEADS,
    qwen3_moe=_LLAMA | _NORMS_OF_HEADS | _QWEN3_MOE | {"blk.ffn_gate_inp": "mlp.gate"},
    smollm3=_LLAMA,
    granite=_LLAMA,
    gemma=_LLAMA,
    gemma2=_LLAMA | _SANDWICH,
    gemma3_text=_LLAMA | _SANDWICH | _NORMS_OF_HEADS,
    phi3=_LLAMA | {"blk.attn_qkv": "self_attn.qkv_proj", "blk.ffn_up": "mlp.gate_up_proj"},
    gpt2={
        "token_embd": "transformer.wte",
        "position_embd": "transformer.wpe",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
        "blk.attn_norm": "ln_1",
        "blk.attn_qkv": "attn.c_attn",
        "blk.attn_output": "attn.c_proj",
        "blk.ffn_norm": "ln_2",
        "blk.ffn_up": "mlp.c_fc",
        "blk.ffn_down": "mlp.c_proj",
    },
)
LAYERS = dict(gpt2="transformer.h.{}.")
PAIRED = ("granite", "llama", "mistral", "mixtral", "smollm3")  # features that rotate together follow each other
PLUS_ONE = ("gemma", "gemma2", "gemma3_text")  # norms multiply by one plus their weight, and the converter adds the one
CONV1D = re.compile(r"blk\..*\.(attn_qkv|attn_output|ffn_up|ffn_down)\.weight")  # matrices of GPT-2 that are [in, out]


@dataclass(frozen=True)
class _Source:
    """What a tensor of the checkpoint is made of: a stored one with its rows in another order, and `shift` added."""

    tensor: StoredTensor
    rows: Layout = as_is
    transposed: bool = False
    shift: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape[::-1] if self.transposed else self.tensor.shape

    @property
    def in_few_bits(self) -> bool:
        return self.tensor.kind.name in STORED

    def in_outputs(self) -> Unread:
        kind, blocks = self.tensor.kind.name, self.tensor.rows()
        outputs, inputs = self.tensor.shape
        order = self.rows(torch.arange(outputs).unsqueeze(1))[:, 0]

        def read(numbers: torch.Tensor) -> Packed:
            # NumPy copies row by row. PyTorch would wait for a thread on each core.
            return packed(kind, torch.from_numpy(blocks.numpy().take(order[numbers].numpy(), 0)))

        return Unread((outputs, inputs), read, self.transposed)

    def numbers(self) -> torch.Tensor:
        if self.in_few_bits:
            found = self.in_outputs().whole().numbers
        else:
            found = self.rows(self.tensor.rows().view(TYPES[self.tensor.kind.name]))
        found = found.float() + self.shift if self.shift else found
        return found.T if self.transposed else found


def open_gguf(path: Path) -> tuple[Readers, PackedReaders, dict[str, tuple[int, ...]]]:
    """Return the readers of a model's tensors by the names of a checkpoint, and their shapes. Reads headers only.

    Those of matrices in few bits come as numbers, and for themselves as they are stored. Of a split model, `path` is
    any of the files. CheckpointError if a file is missing or damaged, or if such a model is not read.
    """
    file = open_files(path)
    sources = _sources(file, attributes(_described(file)))

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
    found = attributes(_described(file))
    matrices = {name: source for name, source in _sources(file, found).items() if len(source.shape) == 2}
    kinds = {name: source.tensor.kind.name for name, source in matrices.items()}
    if any(source.in_few_bits for source in matrices.values()):
        return found | {"dtype": "bfloat16", QUANTIZATION: dict(quant_method=GGUF, matrices=kinds)}
    usual = Counter(kinds.values()).most_common(1)[0][0]
    return found | dict(dtype=str(TYPES[usual]).removeprefix("torch."))


def _described(file: GgufFile) -> Described:
    def numbers(name: str) -> list[float]:
        tensor = file.tensors[name]
        if tensor.kind.name not in TYPES:
            raise CheckpointError(
                f"{file.path}: {name!r} has the type {tensor.kind.name}, expected F32; convert it again"
            )
        return [float(number) for number in _Source(tensor).numbers()]

    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    return Described(str(file.path), file.metadata, shapes, numbers)


def _sources(file: GgufFile, facts: Mapping[str, Any]) -> dict[str, _Source]:
    """Return what each tensor of the checkpoint is made of, given the model's attributes."""
    described = _described(file)
    found: dict[str, _Source] = {}
    for tensor in file.tensors.values():
        if tensor.name in FACTORS or tensor.name.endswith(".attn_rot_embd.weight"):  # frequencies, in old files
            continue
        for name, part in _named(described, facts, tensor):
            if name in found:
                raise described.refused(f"{tensor.name!r} and {found[name].tensor.name!r} are both {name}")
            found[name] = _source(described, facts, part)
    return found


def _named(file: Described, facts: Mapping[str, Any], tensor: StoredTensor) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the names that a stored tensor has in the checkpoint: one, or one for each of the experts in it."""
    family, match = facts["model_type"], NAME.fullmatch(tensor.name)
    layer, part, expert, end = match.groups() if match else ("", "", "", "")
    key = f"{'blk.' if layer else ''}{part}{'.*' if expert else ''}"
    if key not in NAMES[family]:
        raise file.refused(f"{tensor.name!r} is none of the tensors of a {family} model", OTHER)
    start = LAYERS.get(family, "model.layers.{}.").format(layer) if layer else ""
    name = f"{start}{NAMES[family][key]}.{end}"
    if not key.endswith("_exps"):
        yield name.format(int(expert or 0)), tensor
        return
    count = file.whole("expert_count")
    if len(tensor.shape) != 3 or tensor.shape[0] != count:
        raise file.refused(f"{tensor.name!r} has sizes {list(tensor.shape)}, expected matrices of {count} experts")
    yield from ((name.format(number), tensor.part(number)) for number in range(count))


def _source(file: Described, facts: Mapping[str, Any], tensor: StoredTensor) -> _Source:
    """Return how a tensor is made of the stored one, whose name llama.cpp has given."""
    family, name, sizes = facts["model_type"], tensor.name, list(tensor.shape)
    if tensor.kind.name in STORED and len(sizes) != 2:
        raise file.refused(f"{name!r} {sizes} has the type {tensor.kind.name}, which only matrices have")
    if family in PAIRED and (match := re.search(r"\.attn_([qk])\.", name)):
        heads, size = facts["num_attention_heads" if match[1] == "q" else "num_key_value_heads"], facts["head_dim"]
        if sizes[0] != heads * size:
            raise file.refused(f"{name!r} has sizes {sizes}, expected rows of {heads} heads with {size} features")
        return _Source(tensor, pairs_as_halves(size, size))
    if family == "gpt2" and CONV1D.fullmatch(name):
        return _Source(tensor, transposed=True)
    return _Source(tensor, shift=-1.0 if family in PLUS_ONE and name.endswith("norm.weight") else 0.0)
