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

import numpy as np
import torch

from transformers_neuronx.config.gguf import GGUF, STORED, attributes
from transformers_neuronx.config.gguf_metadata import OTHER, Described
from transformers_neuronx.config.gguf_positions import FACTORS
from transformers_neuronx.config.published import QUANTIZATION
from transformers_neuronx.errors import CheckpointError
from transformers_neuronx.weights.formats import Readers
from transformers_neuronx.weights.gguf_blocks import packed
from transformers_neuronx.weights.gguf_file import Elements, GgufFile, StoredTensor, open_files
from transformers_neuronx.weights.layouts import Layout, as_is, pairs_as_halves
from transformers_neuronx.weights.packed import Packed, PackedReaders, Unread

TYPES = dict(F32=torch.float32, F16=torch.float16, BF16=torch.bfloat16)
MOST_LAYERS = 4096
# The layer's number, a name, an expert's number, and what it is.
NAME = re.compile(r"(?:blk\.(0|[1-9][0-9]{0,5})\.)?([a-z_0-9]+|shortconv\.[a-z_]+)(?:\.([0-9]{1,5}))?\.(weight|bias)")


# Names in the file and in the checkpoint, by model type. Those in "blk" are of a layer, which `LAYERS` begins. "*" and
# "{}" stand for the number of an expert; the experts of "_exps" are stacked in one tensor. A name with its end is for a
# whole name in the checkpoint.
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
_GPT_OSS = {
    "blk.post_attention_norm": "post_attention_layernorm",
    "blk.attn_sinks.weight": "self_attn.sinks",
    "blk.ffn_gate_inp": "mlp.router",
    "blk.ffn_gate_exps.weight": "mlp.experts.{}.gate_up_proj",
    "blk.ffn_up_exps.weight": "mlp.experts.{}.gate_up_proj",
    "blk.ffn_down_exps.weight": "mlp.experts.{}.down_proj",
    "blk.ffn_gate_exps.bias": "mlp.experts.gate_up_proj_bias",
    "blk.ffn_up_exps.bias": "mlp.experts.gate_up_proj_bias",
    "blk.ffn_down_exps.bias": "mlp.experts.down_proj_bias",
}
_LFM2 = {
    "token_embd": "model.embed_tokens",
    "token_embd_norm": "model.embedding_norm",
    "output": "lm_head",
    "blk.attn_norm": "operator_norm",
    "blk.attn_q": "self_attn.q_proj",
    "blk.attn_k": "self_attn.k_proj",
    "blk.attn_v": "self_attn.v_proj",
    "blk.attn_output": "self_attn.out_proj",
    "blk.attn_q_norm": "self_attn.q_layernorm",
    "blk.attn_k_norm": "self_attn.k_layernorm",
    "blk.shortconv.in_proj": "conv.in_proj",
    "blk.shortconv.conv": "conv.conv",
    "blk.shortconv.out_proj": "conv.out_proj",
    "blk.ffn_norm": "ffn_norm",
    "blk.ffn_gate": "feed_forward.w1",
    "blk.ffn_up": "feed_forward.w3",
    "blk.ffn_down": "feed_forward.w2",
}
_NORMS_OF_HEADS = {"blk.attn_q_norm": "self_attn.q_norm", "blk.attn_k_norm": "self_attn.k_norm"}
_SANDWICH = {
    "blk.post_attention_norm": "post_attention_layernorm",
    "blk.ffn_norm": "pre_feedforward_layernorm",
    "blk.post_ffw_norm": "post_feedforward_layernorm",
}
_OLMO2 = {name: own for name, own in _LLAMA.items() if name not in ("blk.attn_norm", "blk.ffn_norm")} | {
    "blk.post_attention_norm": "post_attention_layernorm",
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
    lfm2=_LFM2,
    olmo2=_OLMO2 | _NORMS_OF_HEADS,
    olmo3=_OLMO2 | _NORMS_OF_HEADS,
    seed_oss=_LLAMA | {"blk.post_attention_norm": "post_attention_layernorm"},
    granite=_LLAMA,
    gemma=_LLAMA,
    gemma2=_LLAMA | _SANDWICH,
    gemma3_text=_LLAMA | _SANDWICH | _NORMS_OF_HEADS,
    phi3=_LLAMA | {"blk.attn_qkv": "self_attn.qkv_proj", "blk.ffn_up": "mlp.gate_up_proj"},
    gpt_oss={name: own for name, own in _LLAMA.items() if ".ffn_" not in name} | _GPT_OSS,
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
# Matrices that are [in, out] in the checkpoint, and of gpt-oss tensors that are one there, with features in turns.
TURNED = dict(
    gpt2=re.compile(r"blk\..*\.(attn_qkv|attn_output|ffn_up|ffn_down)\.weight"),
    gpt_oss=re.compile(r"blk\..*\.ffn_(gate|up|down)_exps\.weight"),
)
KERNELS = ".shortconv.conv.weight"  # of convolutions: [channels, taps], and in the checkpoint [channels, 1, taps]
IN_TURNS = dict(gpt_oss=re.compile(r"blk\..*\.ffn_(gate|up)_exps\.(weight|bias)"))


@dataclass(frozen=True)
class _Source:
    """What a tensor of the checkpoint is made of: a stored one with its rows in another order, and `shift` added.

    Or several, of one type and shape. They take turns with their features, which are the last axis in the checkpoint.
    What is `spread` has an axis of one after its first.
    """

    tensors: tuple[StoredTensor, ...]
    rows: Layout = as_is
    transposed: bool = False
    shift: float = 0.0
    spread: bool = False

    @property
    def kind(self) -> str:
        return self.tensors[0].kind.name

    @property
    def shape(self) -> tuple[int, ...]:
        *lead, last = self.tensors[0].shape[::-1] if self.transposed else self.tensors[0].shape
        return (*lead, *[1] * self.spread, len(self.tensors) * last)

    @property
    def in_few_bits(self) -> bool:
        return self.kind in STORED

    def in_outputs(self) -> Unread:
        kind, blocks = self.kind, [tensor.rows().numpy() for tensor in self.tensors]
        inputs, count = self.tensors[0].shape[1], len(blocks)
        outputs = count * len(blocks[0])
        order = self.rows(torch.arange(outputs).unsqueeze(1))[:, 0]

        def read(numbers: torch.Tensor) -> Packed:
            # NumPy copies row by row. PyTorch would wait for a thread on each core.
            places = order[numbers].numpy()
            if count == 1:
                return packed(kind, torch.from_numpy(blocks[0].take(places, 0)))
            taken = np.empty((len(places), *blocks[0].shape[1:]), np.uint8)
            for turn, each in enumerate(blocks):
                here = places % count == turn
                taken[here] = each.take(places[here] // count, 0)
            return packed(kind, torch.from_numpy(taken))

        return Unread((outputs, inputs), read, self.transposed)

    def numbers(self) -> torch.Tensor:
        if self.in_few_bits:
            found = self.in_outputs().whole().numbers
        else:
            parts = [self.rows(tensor.rows().view(TYPES[self.kind])) for tensor in self.tensors]
            axis = 0 if self.transposed else parts[0].ndim - 1
            found = torch.stack(parts, axis + 1).flatten(axis, axis + 1) if parts[1:] else parts[0]
        found = found.float() + self.shift if self.shift else found
        found = found.unsqueeze(1) if self.spread else found
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
    sources = {name: source for name, source in _sources(file, found).items() if not name.endswith("bias")}
    matrices = {name: source for name, source in sources.items() if len(source.shape) == 2}
    kinds = {name: source.kind for name, source in matrices.items()}
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
        return [float(number) for number in _Source((tensor,)).numbers()]

    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    return Described(str(file.path), {key: _short(value) for key, value in file.metadata.items()}, shapes, numbers)


def _short(value: Any) -> Any:
    """Return a value of the metadata, as a list if it is an array with a value for each layer at most."""
    return value.read() if isinstance(value, Elements) and value.count <= MOST_LAYERS else value


def _sources(file: GgufFile, facts: Mapping[str, Any]) -> dict[str, _Source]:
    """Return what each tensor of the checkpoint is made of, given the model's attributes."""
    described = _described(file)
    found: dict[str, list[StoredTensor]] = {}
    for tensor in file.tensors.values():
        if tensor.name in FACTORS or tensor.name.endswith(".attn_rot_embd.weight"):  # frequencies, in old files
            continue
        for name, part in _named(described, facts, tensor):
            found.setdefault(name, []).append(part)
    return {name: _source(described, facts, name, *parts) for name, parts in found.items()}


def _named(file: Described, facts: Mapping[str, Any], tensor: StoredTensor) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the names that a stored tensor has in the checkpoint: one, or one for each of the experts in it."""
    family, match = facts["model_type"], NAME.fullmatch(tensor.name)
    layer, part, expert, end = match.groups() if match else ("", "", "", "")
    key = f"{'blk.' if layer else ''}{part}{'.*' if expert else ''}"
    known = NAMES[family]
    if not known.keys() & {key, f"{key}.{end}"}:
        raise file.refused(f"{tensor.name!r} is none of the tensors of a {family} model", OTHER)
    start = LAYERS.get(family, "model.layers.{}.").format(layer) if layer else ""
    name = start + (known[key] + f".{end}" if key in known else known[f"{key}.{end}"])
    if not key.endswith("_exps") or "{}" not in name:
        yield name.format(int(expert or 0)), tensor
        return
    count = file.whole("expert_count")
    if len(tensor.shape) != 3 or tensor.shape[0] != count:
        raise file.refused(f"{tensor.name!r} has sizes {list(tensor.shape)}, expected matrices of {count} experts")
    yield from ((name.format(number), tensor.part(number)) for number in range(count))


def _source(file: Described, facts: Mapping[str, Any], name: str, *tensors: StoredTensor) -> _Source:
    """Return how a tensor of the checkpoint is made of stored ones, whose names llama.cpp has given."""
    family, (tensor, *more) = facts["model_type"], sorted(tensors, key=lambda tensor: tensor.name)  # a gate is first
    stored, sizes = tensor.name, list(tensor.shape)
    in_turns = family in IN_TURNS and IN_TURNS[family].fullmatch(stored)
    if len(more) > bool(in_turns):
        raise file.refused(f"{' and '.join(repr(each.name) for each in tensors)} are both {name}")
    if in_turns and not more:
        raise file.refused(f"{stored!r} is alone, expected both ffn_gate_exps and ffn_up_exps")
    if in_turns and (more[0].kind, more[0].shape) != (tensor.kind, tensor.shape):
        raise file.refused(f"{stored!r} and {more[0].name!r} must have one type and the same sizes", OTHER)
    kernel = stored.endswith(KERNELS)
    if kernel and len(sizes) != 2:
        raise file.refused(f"{stored!r} has sizes {sizes}, expected [channels, taps]")
    if tensor.kind.name in STORED and (len(sizes) != 2 or kernel or stored.endswith("bias")):
        raise file.refused(f"{stored!r} {sizes} has the type {tensor.kind.name}, which only matrices have")
    if family in PAIRED and (match := re.search(r"\.attn_([qk])\.", stored)):
        heads, size = facts["num_attention_heads" if match[1] == "q" else "num_key_value_heads"], facts["head_dim"]
        if sizes[0] != heads * size:
            raise file.refused(f"{stored!r} has sizes {sizes}, expected rows of {heads} heads with {size} features")
        return _Source((tensor,), pairs_as_halves(size, size))
    turned = family in TURNED and TURNED[family].fullmatch(stored) is not None
    shift = -1.0 if family in PLUS_ONE and stored.endswith("norm.weight") else 0.0
    return _Source((tensor, *more), transposed=turned, shift=shift, spread=kernel)
